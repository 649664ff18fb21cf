"""The node's data-plane door."""
