"""State that the processes of a router, or all routers, share."""
