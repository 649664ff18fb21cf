"""Keeps freed memory in the process, for the next large bodies.

The C library returns freed memory to the kernel when there is much at the end of the heap. The next
request of a megabyte then takes it back, with a page fault for each 4 KiB that it writes.
"""

import ctypes
from contextlib import suppress
from typing import Final

KEPT_BYTES: Final = 32 * 1024 * 1024
"""The most freed memory at the end of the heap that is kept: some bodies of the largest size."""

HEAP_BYTES_MAX: Final = 16 * 1024 * 1024
"""Larger blocks have memory of their own, which is always returned. No body is so large."""

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""The parameters of glibc's `mallopt` (malloc.h)."""


def keep_freed_memory() -> None:
    """Set what this process keeps; nothing with a C library other than glibc."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, HEAP_BYTES_MAX)
