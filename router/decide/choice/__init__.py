"""Which replica answers a request: ranking by predicted time to first token."""
