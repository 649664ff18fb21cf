"""Batches: their items are answered here, and runs of Workers AI are queued as batches."""
