"""Simulators: the production decision code, unchanged, over worlds drawn by stated rules."""
