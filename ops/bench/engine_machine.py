"""The machine's memory bandwidth, to which decode rates are compared."""

import time
from typing import Final

import torch

_BYTES: Final = 256 * 1024 * 1024


def bandwidth_bytes_per_s(threads: int) -> float:
    """Return bytes read and written per second by copying large buffers, best of a few runs."""
    torch.set_num_threads(threads)
    source = torch.ones(_BYTES // 8, dtype=torch.int64)
    target = torch.zeros_like(source)
    clock_s = time.process_time if threads == 1 else time.perf_counter
    best_s = float("inf")
    for _ in range(5):
        started_s = clock_s()
        target.copy_(source)
        best_s = min(best_s, clock_s() - started_s)
    return 2 * _BYTES / best_s
