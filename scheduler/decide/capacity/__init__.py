"""Capacity of the hardware: whether a replica fits, its rates, its start time, and round trips.

Modules inside `scheduler.decide` import the modules of this package directly.
"""
