"""Memory for what lives as long as the engine, weights and KV, on the system's large pages.

A step reads all weights once: from pages of 4 KiB, which it must find one by one, at two thirds of
the speed that it has from those of 2 MiB. It is nought where nobody wrote, and taken when written.
"""

import ctypes
import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

PAGE_BYTES: Final = 2 * 1024 * 1024
_LINE_BYTES: Final = 64
_ROOM_BYTES: Final = 32 * PAGE_BYTES


def lasting(size_bytes: int) -> Tensor:
    """Return so many bytes, zero, that begin with a large page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, size_bytes + PAGE_BYTES, flags=flags)
    # A system that has no large pages says so here, and gives small ones.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + size_bytes]


def give_back() -> None:
    """Give the system what was freed: of fp32 weights that were unpacked, a third of their size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Room:
    """Hands out memory piece by piece, so that small matrices share large pages."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> Tensor:
        """Return so many bytes, zero, at the beginning of a cache line."""
        rounded = -(-size_bytes // _LINE_BYTES) * _LINE_BYTES
        if rounded > len(self._left):
            self._left = lasting(max(rounded, _ROOM_BYTES))
        taken, self._left = self._left[:size_bytes], self._left[rounded:]
        return taken
