"""Being asked: decode, one call, encode. Admin, agents and routers each have a file."""
