"""The connected peers: registry, send queues, heartbeats, tokens."""
