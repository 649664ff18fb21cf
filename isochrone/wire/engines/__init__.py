"""Engines: their configuration, options and capabilities."""
