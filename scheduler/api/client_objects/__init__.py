"""Endpoints for the objects that clients store through routers: files, batches, responses,
adapters."""
