"""What hardware can carry: whether a replica fits, its rates, how soon it is warm, how far it is.

Modules inside `scheduler.decide` import the modules of this package directly.
"""
