"""Takes the memory of the KV cache from the system before a prompt needs it.

The system zeroes a page when it is first touched. A prompt whose blocks lie on new huge pages in
each layer would wait for all of them.

Rule 1: no content changes (MADV_POPULATE_WRITE), so it runs beside steps and transfers.
Rule 2: it takes a page at a time and pauses in between, so that it gets a fifth of one core at
most. Its thread has no low priority: it holds the lock of the address space for a page's time.
Rule 3: it ends where memory is short. The other pages are then touched when they are first used.
"""

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil
from torch import Tensor

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels.huge_pages import PAGE_BYTES
from nodeagent.engine.memory.memory_watch import memory_uses

log = logging.getLogger(__name__)

SPARE_BYTES: Final = 1 << 30
"""It ends where less than this is free: the plan's memory may be taken by others."""

PAUSE_FACTOR: Final = 4
"""It pauses for this many times as long as touching a page took."""

_CHECK_PAGES: Final = 64
"""Pages between two looks at the free memory."""

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14. Python's mmap has no name for it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FirstTouch:
    """Touches regions of memory on a thread of its own, until it is stopped."""

    _regions: Sequence[Tensor]

    def __init__(self, regions: Sequence[Tensor], spare_bytes: Callable[[], int]) -> None:
        """Each of `regions` begins at a page. `spare_bytes` returns how much memory is free."""
        self._regions = regions
        self._spare_bytes = spare_bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="first-touch", daemon=True)
        self.touched_bytes = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Touch nothing more, from when it returns."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        # A sleep frees the memory with its last reference.
        self._regions = ()

    def _run(self) -> None:
        """Touch all layers side by side: the lowest blocks are used first."""
        end = max((region.nbytes for region in self._regions), default=0)
        pages = 0
        for offset in range(0, end, PAGE_BYTES):
            for region in self._regions:
                size = min(region.nbytes - offset, PAGE_BYTES)
                if size <= 0:
                    continue
                if pages % _CHECK_PAGES == 0 and self._spare_bytes() < SPARE_BYTES:
                    log.info("KV memory is touched as it is used", extra=_because("little is free"))
                    return
                started_s = time.monotonic()
                if code := _populate(region.data_ptr() + offset, size):
                    log.info("KV memory is touched as it is used", extra=_because(code))
                    return
                pages += 1
                self.touched_bytes += size
                if self._stopping.wait(PAUSE_FACTOR * (time.monotonic() - started_s)):
                    return


def first_touch(executor: object, memory_max_bytes: int, *, sleeps: bool) -> FirstTouch:
    """Return what touches the KV of an engine that is in host memory of this process alone.

    Of an engine that `sleeps` none is touched: a sleep gives it back, and it is on small pages
    after a wake, where a first touch costs little.
    """
    regions: list[Tensor] = []
    if isinstance(executor, ModelRunner) and executor.device == "cpu" and not sleeps:
        regions = executor.kv_pages()

    def spare_bytes() -> int:
        uses = memory_uses(memory_max_bytes)
        return min([int(psutil.virtual_memory().available), *(use.left_bytes for use in uses)])

    return FirstTouch(regions, spare_bytes)


def _populate(address: int, size_bytes: int) -> str:
    """Touch memory without changing it; return why that failed, or ""."""
    while _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return os.strerror(code)
    return ""


def _because(reason: str) -> dict[str, object]:
    return {"fields": {"because": reason}}
