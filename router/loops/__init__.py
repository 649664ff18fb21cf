"""Duties: follow routes, probe round trips, ship usage."""
