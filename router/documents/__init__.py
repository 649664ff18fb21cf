"""Converts documents of clients to Markdown, each in a process that can reach nothing else."""
