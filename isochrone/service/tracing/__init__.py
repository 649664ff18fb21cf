"""Distributed traces: spans of sampled requests, sent to an OpenTelemetry collector."""
