"""Decisions about requests: admission, seats, handoff, prefill legs, KV."""
