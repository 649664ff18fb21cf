"""Usage on disk the moment a request ends: what a killed router had not yet batched is not lost.

Rows are appended as msgpack, one write each, without waiting for the platter: a killed process
loses nothing, a power cut the last moment. When rows go into a batch another file is begun, and
those before it are removed once the batch is on disk. A row read twice is counted once, for the
store knows request ids.
"""

import errno
import logging
import os
from pathlib import Path
from typing import Final

import msgpack
import msgspec

from isochrone.wire.usage import UsageRow

log = logging.getLogger(__name__)

BYTES_MAX: Final = 64 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()


class UsageJournal:
    """One append-only file after another; those before the last wait for their batch."""

    def __init__(self, folder: Path) -> None:
        """Keep `rows.<n>` in `folder`."""
        self._folder = folder
        self._descriptor: int | None = None
        self._bytes = 0
        self._path = folder
        self._number = 0
        self._aside: tuple[Path, ...] = ()
        self._problem = ""

    def open(self) -> tuple[UsageRow, ...]:
        """Return the rows that an earlier life left behind, and begin anew.

        Their files stay until the rows are in a batch.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._aside = tuple(sorted(self._folder.glob("rows*")))
        rows = tuple(row for path in self._aside for row in _read_rows(path))
        numbers = [path.suffix.removeprefix(".") for path in self._aside]
        self._number = max((int(number) for number in numbers if number.isdigit()), default=0)
        self._begin()
        return rows

    def append(self, row: UsageRow) -> None:
        """Write one row."""
        if self._descriptor is None or self._bytes > BYTES_MAX:
            return
        data = _encoder.encode(row)
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                # A full disk took a part of it: behind that no row could be read.
                os.ftruncate(self._descriptor, self._bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._say(str(error))
            return
        self._bytes += written
        self._problem = ""

    def rotate(self) -> tuple[Path, ...]:
        """Set aside what was written so far, and return all files that are.

        A disk that takes no other file leaves the last one in use.
        """
        before, path, has_rows = self._descriptor, self._path, self._bytes > 0
        if (before is None or has_rows) and self._begin() and before is not None:
            os.close(before)
            self._aside += (path,)
        return self._aside

    def saved(self, aside: tuple[Path, ...]) -> None:
        """Remove files whose rows are in a batch."""
        for path in aside:
            path.unlink(missing_ok=True)
        self._aside = tuple(path for path in self._aside if path not in aside)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> bool:
        path = self._folder / f"rows.{self._number + 1:09d}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            self._say(str(error))
            return False
        self._number += 1
        self._path = path
        self._bytes = 0
        return True

    def _say(self, reason: str) -> None:
        # Once for each reason: a disk that is full for an hour must not fill the logs too.
        if reason != self._problem:
            fields = {"folder": str(self._folder), "reason": reason}
            log.warning("cannot journal usage, it waits in memory", extra={"fields": fields})
        self._problem = reason


def _read_rows(path: Path) -> list[UsageRow]:
    """Return the whole rows of a journal; a torn last one is where its writer was killed."""
    rows: list[UsageRow] = []
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=BYTES_MAX * 2)
        try:
            rows += [msgspec.convert(fields, UsageRow) for fields in unpacker]
        except (msgpack.UnpackException, msgspec.ValidationError, ValueError) as error:
            log.warning("torn journal", extra={"fields": {"path": path.name, "why": str(error)}})
    return rows
