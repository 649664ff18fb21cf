"""Pure decisions: plain functions of a cluster state that read neither a clock nor the network.

Each package has one entry point, its `__init__`; the rest of the scheduler imports from there.
"""
