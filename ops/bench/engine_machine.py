"""What the machine itself can do: the memory bandwidth that decoding is held against."""

import time
from typing import Final

import torch

_BYTES: Final = 256 * 1024 * 1024


def bandwidth_bytes_per_s(threads: int) -> float:
    """Copy between two buffers larger than any cache; bytes read and written, best of a few."""
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
