"""Where weights lie on this node, and how fast they come from there: the page cache, the disk.

Blocking: called from threads.
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
"""Pages looked at to say whether an artifact is in the page cache."""

CACHED_SHARE: Final = 0.95
STILL_CACHED_SHARE: Final = 0.5
"""What was in the page cache counts as there until half of it is gone: it must not come and go."""

READ_BYTES: Final = 4 * 1024 * 1024
MEASURED_BYTES: Final = 64 * 1024 * 1024
"""What is read to see how fast the disk is; files smaller than it say nothing."""

_libc: Final = ctypes.CDLL(None)


def is_in_host_memory(files: Sequence[Path], was: bool = False) -> bool:
    """Say whether these files can be read almost without the disk; `was` is the last answer."""
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    if not total:
        return False
    step = max(1, total // PROBES)
    probed = cached = begins = 0
    for file, size in zip(files, sizes, strict=True):
        # The probes lie `step` apart in all the files laid end to end.
        offsets = range(-begins % step, size, step)
        begins += size
        if not offsets:
            continue
        probed += len(offsets)
        cached += _cached_at(file, size, offsets)
    return cached >= (STILL_CACHED_SHARE if was else CACHED_SHARE) * probed


def disk_bytes_per_s(file: Path) -> float:
    """Return how fast a file comes from the disk itself; 0 where that cannot be said.

    Read past the page cache, which is left as it is: neither measured nor emptied.
    """
    if file.stat().st_size < MEASURED_BYTES:
        return 0.0
    with suppress(OSError), mmap.mmap(-1, READ_BYTES) as aligned:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            began = time.monotonic()
            for offset in range(0, MEASURED_BYTES, READ_BYTES):
                os.preadv(descriptor, [aligned], offset)
            return MEASURED_BYTES / max(time.monotonic() - began, 1e-6)
        finally:
            os.close(descriptor)
    return 0.0


def _cached_at(file: Path, size: int, offsets: Iterable[int]) -> int:
    """Count the offsets whose page is in the page cache; reading them would put them there."""
    seen = ctypes.c_ubyte()
    cached = 0
    # Private and never written to: a mapping whose address ctypes will tell.
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as m:
        first = ctypes.c_char.from_buffer(m)
        begins = ctypes.addressof(first)
        for offset in offsets:
            page = begins + offset - offset % mmap.PAGESIZE
            if _libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(seen)) == 0:
                cached += seen.value & 1
        # The mapping cannot be closed while something points into it.
        del first
    return cached
