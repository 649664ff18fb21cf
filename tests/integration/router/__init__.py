"""The router over real sockets, with fake nodes whose faults are configurable."""
