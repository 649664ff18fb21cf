"""The node's data plane: the HTTP server that routers and other nodes send requests to."""
