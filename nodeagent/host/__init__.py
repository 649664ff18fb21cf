"""The machine itself: devices, weights, engine processes, the ledger on disk."""
