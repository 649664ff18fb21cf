"""Benchmarks: each prints a table, and the table is kept beside it with where it came from."""
