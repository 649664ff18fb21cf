"""Decides what each engine step computes: which sequences run, in which KV blocks.

Entry point: `batch_scheduler.BatchScheduler`. The package is pure: no tensors, clocks or threads.
"""
