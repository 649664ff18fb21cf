"""Artifacts on this node's disk: fetched, verified, served from caches."""
