"""Decisions about replicas: reconcile, restart, sleep, end."""
