"""The memory of this process: its limits, its use, and whether it has space for another request.

Entry points: `memory_watch.MemoryWatch` for requests, `memory_watch.available_bytes` for loading.
"""
