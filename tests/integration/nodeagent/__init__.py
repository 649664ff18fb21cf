"""The agent with real files, processes and sockets."""
