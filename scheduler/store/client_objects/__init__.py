"""The rows of what clients store: files, batches, responses, adapters."""
