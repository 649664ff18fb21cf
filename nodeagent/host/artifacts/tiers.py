"""Finds an artifact's bytes, in the page cache or on disk, and measures how fast the disk reads.

These functions block: call them from a thread.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

PROBES: Final = 64
"""Number of pages that are checked to decide whether an artifact is in the page cache."""

CACHED_SHARE: Final = 0.95
STILL_CACHED_SHARE: Final = 0.5
"""An artifact counts as cached from CACHED_SHARE on, and until it falls below this share. The gap
keeps the report from flapping."""

READ_BYTES: Final = 4 * 1024 * 1024
MEASURED_BYTES: Final = 64 * 1024 * 1024
"""Bytes read to measure the disk; smaller files are not measured."""

_libc: Final = ctypes.CDLL(None)


def is_in_host_memory(files: Sequence[Path], was: bool = False) -> bool:
    """Return True if nearly all pages of the files are in the page cache.

    `was` is the previous result.
    """
    sizes = [file.stat().st_size for file in files]
    total_bytes = sum(sizes)
    if not total_bytes:
        return False
    step = max(1, total_bytes // PROBES)
    probed = cached = file_start = 0
    for file, size in zip(files, sizes, strict=True):
        # Probes lie `step` bytes apart in the concatenation of all files.
        offsets = range(-file_start % step, size, step)
        file_start += size
        if not offsets:
            continue
        probed += len(offsets)
        cached += _count_cached(file, size, offsets)
    return cached >= (STILL_CACHED_SHARE if was else CACHED_SHARE) * probed


def disk_bytes_per_s(file: Path) -> float:
    """Measure how fast the disk reads a file; 0 if the file is too small or cannot be read.

    Direct I/O bypasses the page cache and leaves its content as it is.
    """
    if file.stat().st_size < MEASURED_BYTES:
        return 0.0
    with suppress(OSError), mmap.mmap(-1, READ_BYTES) as aligned:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            start_s = time.monotonic()
            for offset in range(0, MEASURED_BYTES, READ_BYTES):
                os.preadv(descriptor, [aligned], offset)
            return MEASURED_BYTES / max(time.monotonic() - start_s, 1e-6)
        finally:
            os.close(descriptor)
    return 0.0


def _count_cached(file: Path, size: int, offsets: Iterable[int]) -> int:
    """Count the offsets whose page is in the page cache, by mincore(2), without reading them."""
    residency = ctypes.c_ubyte()
    cached = 0
    # A private mapping that is never written to: ctypes gives its address only if it is writable.
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as m:
        first_byte = ctypes.c_char.from_buffer(m)
        address = ctypes.addressof(first_byte)
        for offset in offsets:
            page = address + offset - offset % mmap.PAGESIZE
            result = _libc.mincore(
                ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(residency)
            )
            if result == 0:
                cached += residency.value & 1
        # A mapping cannot be closed while a ctypes object points into it.
        del first_byte
    return cached
