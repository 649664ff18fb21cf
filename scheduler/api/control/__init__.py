"""The control connections of agents and routers, and how they join."""
