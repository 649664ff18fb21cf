"""Memory on huge pages for what lives as long as the engine: weights and the KV cache.

A step reads all weights once. With 4 KiB pages the address translation slows this to two thirds of
the speed with 2 MiB pages. The memory is zero, and taken from the system when first written.
"""

import ctypes
import mmap
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

PAGE_BYTES: Final = 2 * 1024 * 1024
_CACHE_LINE_BYTES: Final = 64
_ARENA_BYTES: Final = 32 * PAGE_BYTES


def huge_page_bytes(size_bytes: int) -> Tensor:
    """Return `size_bytes` zero bytes that begin at a huge page."""
    return _from_huge_page(_map(size_bytes), size_bytes)


def trim_heap() -> None:
    """Return freed memory to the system; after unpacking weights, a third of their fp32 size."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HugePageArena:
    """Allocates small matrices side by side on shared huge pages; nothing is ever freed."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        # Weakly: a mapping lives as long as the matrices in it.
        self._mappings: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()
        """The bytes in use of each mapping."""
        self._newest: mmap.mmap | None = None
        """The mapping in which there is free memory."""

    def take(self, size_bytes: int) -> Tensor:
        """Return `size_bytes` zero bytes that begin at a cache line."""
        rounded = -(-size_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if rounded > len(self._free):
            size = max(_whole_pages(rounded), _ARENA_BYTES)
            self._newest = _map(size)
            self._mappings[self._newest] = 0
            self._free = _from_huge_page(self._newest, size)
        assert self._newest is not None
        self._mappings[self._newest] += rounded
        taken, self._free = self._free[:size_bytes], self._free[rounded:]
        return taken

    def regions(self) -> list[Tensor]:
        """Return the memory in use: bytes of whole huge pages.

        To drop a part of a huge page would split it into small ones.
        """
        return [
            _from_huge_page(mapped, _whole_pages(used)) for mapped, used in self._mappings.items()
        ]


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _map(size_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, size_bytes + PAGE_BYTES, flags=flags)
    # Fails on a system without huge pages, which then uses small ones.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _from_huge_page(mapped: mmap.mmap, size_bytes: int) -> Tensor:
    unaligned = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -unaligned.data_ptr() % PAGE_BYTES
    return unaligned[start : start + size_bytes]
