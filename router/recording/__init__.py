"""Records requests: metrics, usage and traces."""
