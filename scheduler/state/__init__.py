"""The state that one scheduler process holds in memory, one idea a module.

All of it can be lost: it is rebuilt from Postgres and from what peers report again.
"""
