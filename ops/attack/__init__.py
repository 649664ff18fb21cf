"""Attacks on a fleet of one's own, on loopback: each prints how far it gets."""
