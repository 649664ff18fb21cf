"""Reading a file whole: out of the page cache where it lies there, past it where it does not.

Measured (ops/bench/kv_tiers.md): of a cold disk O_DIRECT is half as fast again as reading through
the page cache, and what lies in that cache comes three times as fast from there. A mapped file is
as slow as read(2) when cold, and a bad sector in it ends the process, so files are not mapped.
"""

import mmap
import os
import threading
from pathlib import Path
from typing import Final

_SECTOR: Final = 4096


class WholeFiles:
    """Reads files; keeps aligned memory for the largest so far. Any thread may call."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SECTOR)
        self._lock = threading.Lock()

    def read(self, path: Path, head_bytes: int) -> tuple[bytearray, bytearray]:
        """Return the first `head_bytes` of a file and the rest, or raise OSError."""
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = bytearray(min(head_bytes, size))
            rest = bytearray(size - len(head))
            if not (
                _read(file.fileno(), head, rest, os.RWF_NOWAIT)
                or self._direct(path, head, rest)
                or _read(file.fileno(), head, rest)
            ):
                raise OSError(f"cannot read {path}: it ends before its {size} bytes")
        return head, rest

    def _direct(self, path: Path, head: bytearray, rest: bytearray) -> bool:
        size = len(head) + len(rest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            # Not every file system can; then it is read as others are.
            return False
        try:
            with self._lock:
                if len(self._memory) < size:
                    self._memory = mmap.mmap(-1, -(-size // _SECTOR) * _SECTOR)
                if os.preadv(descriptor, [self._memory], 0) != size:
                    return False
                with memoryview(self._memory) as memory:
                    head[:] = memory[: len(head)]
                    rest[:] = memory[len(head) : size]
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def _read(descriptor: int, head: bytearray, rest: bytearray, flags: int = 0) -> bool:
    """Fill both; False where not all of it could be had this way."""
    try:
        return os.preadv(descriptor, [head, rest], 0, flags) == len(head) + len(rest)
    except OSError:
        return False
