"""Sequences, KV blocks and batching as plain values. No tensor, no clock."""
