"""The file that a usage journal appends rows to. A row that it has taken survives the process.

The compiled request path copies rows into the file's memory (`mapped_file.c`), because a system
call would take longer. Zeros follow the last row of such a file: space for more rows.
"""

import errno
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class JournalFile(Protocol):
    """An open file without rows. It owns its descriptor."""

    def append(self, row: bytes) -> None:
        """Append a row. Raises OSError if the disk does not take it, or the file is full."""

    def close(self) -> None:
        """Close the file."""


class WrittenFile:
    """A file that each row is written to."""

    def __init__(self, descriptor: int, bytes_max: int) -> None:
        """Take at most `bytes_max` bytes of rows."""
        self._descriptor = descriptor
        self._bytes_max = bytes_max
        self._bytes = 0

    def append(self, row: bytes) -> None:
        """See JournalFile."""
        if self._bytes + len(row) > self._bytes_max:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if os.pwrite(self._descriptor, row, self._bytes) < len(row):
            # The next row overwrites the part of this one that a full disk took.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._bytes += len(row)

    def close(self) -> None:
        """See JournalFile."""
        os.close(self._descriptor)


new_journal_file: Callable[[int, int], JournalFile] = WrittenFile

with suppress(ImportError):
    new_journal_file = importlib.import_module("router.recording.mapped_file").MappedFile
