"""Periodic jobs, one a file. A job takes no input; each turn returns counts."""
