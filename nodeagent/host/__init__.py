"""The agent's contact with its machine and network: devices, files, processes and transfers."""
