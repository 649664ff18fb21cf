"""Duties: one a file, no input, each turn answers with counts."""
