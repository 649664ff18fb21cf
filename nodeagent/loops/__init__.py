"""Duties: converge, prefetch, report."""
