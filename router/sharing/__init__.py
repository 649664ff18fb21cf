"""What the processes of a router, and all routers, tell each other."""
