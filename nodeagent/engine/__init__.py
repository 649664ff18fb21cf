"""The embedded PyTorch engine: a process of its own, knows the wire, never the agent."""
