"""Duties: converge, report, watch."""
