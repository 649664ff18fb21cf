"""What clients store, relayed by routers: files, batches, responses, adapters."""
