"""Carrying bytes between a client and a node, and reading the usage frame on the way."""
