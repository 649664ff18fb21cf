"""The router over real sockets, before nodes that misbehave on request."""
