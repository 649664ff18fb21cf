"""Periodic jobs: follow routes, probe nodes, ship reports, share prompts, set gauges."""
