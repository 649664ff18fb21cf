"""The agent's decisions and drivers."""
