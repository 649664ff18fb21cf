"""Servers and connections: HTTP, the control connection, name lookups."""
