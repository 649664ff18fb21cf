"""Benchmarks: what each part costs, measured side by side."""
