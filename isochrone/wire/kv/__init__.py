"""KV blocks between replicas: transferred, shared, stored."""
