"""What is recorded of requests: metrics, usage and traces."""
