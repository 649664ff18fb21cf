"""Periodic jobs, one a file: of routes, probes, reports, batches, responses and gauges."""
