"""Which requests are admitted: keys, limits, fair queueing, retries, suspect requests."""
