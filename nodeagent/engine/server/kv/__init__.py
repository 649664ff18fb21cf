"""KV blocks between engines: sent, received, shared."""
