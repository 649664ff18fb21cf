"""Moves memory of the process to a file and back: the weights of a model that sleeps.

The addresses stay, so a model whose memory comes back runs again as it is. From the page cache this
takes a quarter of the time in which its weights are read and packed again.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

_PIECE_BYTES: Final = 8 << 20
"""The bytes that one thread reads at a time: small, so that all threads end together."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def drop_pages(memory: Tensor) -> None:
    """Give the pages of `memory`, which begins at a page, to the system: it is zero then.

    Raises OSError.
    """
    size_bytes = memory.numel() * memory.element_size()
    if _libc.madvise(memory.data_ptr(), size_bytes, mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot drop {size_bytes} bytes: {os.strerror(code)}")


def use_small_pages(memory: Tensor) -> None:
    """Have the system give pages of 4 KiB for `memory` from now on.

    The first prompt after a wake touches a little of each layer's KV, and a huge page is zeroed
    whole when it is first touched. Fails on a system without huge pages, which has small ones.
    """
    size_bytes = memory.numel() * memory.element_size()
    _libc.madvise(memory.data_ptr(), size_bytes, mmap.MADV_NOHUGEPAGE)


class ParkedMemory:
    """A copy of memory in a file without a name, which goes with this object."""

    def __init__(self, folder: Path, regions: Sequence[Tensor]) -> None:
        """Copy `regions`, each of bytes and from a page on. Raises OSError if `folder` is full."""
        self.regions = tuple(regions)
        self.size_bytes = sum(map(len, regions))
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(self.size_bytes, 1))
            for view, start in self._pieces():
                _write_all(file.fileno(), view, start)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def drop(self) -> None:
        """Give the memory to the system. Raises OSError."""
        for region in self.regions:
            drop_pages(region)

    def restore(self) -> None:
        """Fill the memory again. Raises OSError."""
        with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as threads:
            reads = [threads.submit(self._read, view, start) for view, start in self._pieces()]
        for read in reads:
            read.result()

    def _read(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], start + done)
            if not count:
                raise OSError(f"cannot restore memory: its file ends at byte {start + done}")
            done += count

    def _pieces(self) -> list[tuple[memoryview, int]]:
        """Return pieces of the regions, each with its place in the file."""
        pieces, start = [], 0
        for region in self.regions:
            view = memoryview(region.numpy().data)
            for first in range(0, len(view), _PIECE_BYTES):
                piece = view[first : first + _PIECE_BYTES]
                pieces.append((piece, start))
                start += len(piece)
        return pieces


def _write_all(descriptor: int, view: memoryview, start: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwritev(descriptor, [view[done:]], start + done)
