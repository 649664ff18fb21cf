"""Usage on disk the moment a request ends: what a killed router had not yet batched is not lost.

Rows are appended as msgpack, one write each, without waiting for the platter: a killed process
loses nothing, a power cut the last moment. When rows go into a batch the journal is rotated, and
the rotated file is removed once the batch is on disk. A row read twice is counted once, for the
store knows request ids.
"""

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


class Journal:
    """One append-only file, and rotated ones that wait for their batch."""

    def __init__(self, folder: Path) -> None:
        """Keep `rows` and `rows.<n>` in `folder`."""
        self._folder = folder
        self._descriptor: int | None = None
        self._bytes = 0
        self._rotations = 0

    def open(self) -> tuple[UsageRow, ...]:
        """Return the rows that an earlier life left behind, and begin anew."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        rows: list[UsageRow] = []
        left = sorted(self._folder.glob("rows*"))
        for path in left:
            rows += _read(path)
        self._begin("rows.next")
        for path in left:
            path.unlink(missing_ok=True)
        (self._folder / "rows.next").rename(self._folder / "rows")
        for row in rows:
            self.append(row)
        return tuple(rows)

    def append(self, row: UsageRow) -> None:
        """Write one row."""
        if self._descriptor is None or self._bytes > BYTES_MAX:
            return
        data = _encoder.encode(row)
        try:
            self._bytes += os.write(self._descriptor, data)
        except OSError as error:
            log.warning("cannot journal usage", extra={"fields": {"reason": error.strerror}})

    def rotate(self) -> Path | None:
        """Set aside what was written so far; the caller removes it when its rows are safe."""
        if self._descriptor is None or self._bytes == 0:
            return None
        self._rotations += 1
        aside = self._folder / f"rows.{self._rotations:09d}"
        (self._folder / "rows").rename(aside)
        os.close(self._descriptor)
        self._begin("rows")
        return aside

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._folder / name, flags, 0o600)
        self._bytes = 0


def _read(path: Path) -> list[UsageRow]:
    """Return the whole rows of a journal; a torn last one is where its writer was killed."""
    rows: list[UsageRow] = []
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=BYTES_MAX * 2)
        try:
            rows += [msgspec.convert(fields, UsageRow) for fields in unpacker]
        except (msgpack.UnpackException, msgspec.ValidationError, ValueError) as error:
            log.warning("torn journal", extra={"fields": {"path": path.name, "why": str(error)}})
    return rows
