"""Attacks on the product's own parts, on loopback, bounded in time and count."""
