"""Usage written to disk as soon as a request ends, so that a killed router loses none.

Rows are appended as msgpack to a file (`journal_file.py`), without fsync: a killed process loses
nothing, a power cut loses the last moments. When rows are taken into a batch, a new file is
started, and the earlier files are removed once the batch is on disk. A row that is read twice is
counted once, because the store knows request ids.

Rows are appended by the event loop, which a slow disk would stop. So after an operation that took
SLOW_S the journal pauses: for REST_S rows are in memory only, until their batch is written in a
thread a moment later.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgpack
import msgspec

from isochrone.wire.peers.usage import UsageRow
from router.recording.journal_file import JournalFile, new_journal_file

log = logging.getLogger(__name__)

BYTES_MAX: Final = 64 * 1024 * 1024
"""Rows beyond this size of one file are kept in memory only."""

SLOW_S: Final = 0.25
"""A row takes microseconds at most, and some milliseconds on a busy machine."""

REST_S: Final = 10.0

_encoder = msgspec.msgpack.Encoder()


class UsageJournal:
    """Append-only files: one is written to, the earlier ones wait until their batch is on disk."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        """Keep the files `rows.<n>` in `folder`. `clock` returns monotonic seconds."""
        self._folder = folder
        self._clock = clock
        self._rests_until_s = float("-inf")
        self._file: JournalFile | None = None
        self._has_rows = False
        self._path = folder
        self._number = 0
        self._closed_files: tuple[Path, ...] = ()
        self._last_error = ""

    def open(self) -> tuple[UsageRow, ...]:
        """Return the rows that an earlier run left behind, and start a new file.

        The earlier files stay until their rows are in a batch.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._closed_files = tuple(sorted(self._folder.glob("rows*")))
        rows = tuple(row for path in self._closed_files for row in read_rows(path))
        numbers = [path.suffix.removeprefix(".") for path in self._closed_files]
        self._number = max((int(number) for number in numbers if number.isdigit()), default=0)
        self._start_file()
        return rows

    def append(self, row: UsageRow, now_s: float) -> None:
        """Append one row; log the error if the disk takes none."""
        if self._file is None or now_s < self._rests_until_s:
            return
        try:
            self._file.append(_encoder.encode(row))
        except OSError as error:
            self._log_error(str(error))
            return
        finally:
            self._rest_if_slow(now_s)
        self._has_rows = True
        self._last_error = ""

    def rotate(self) -> tuple[Path, ...]:
        """Close the current file if it has rows; return all closed files.

        If the disk takes no new file, the current one stays in use; so it does while the journal
        rests.
        """
        if self._clock() < self._rests_until_s:
            return self._closed_files
        file, path = self._file, self._path
        if (file is None or self._has_rows) and self._start_file() and file is not None:
            file.close()
            self._closed_files += (path,)
        return self._closed_files

    def remove(self, paths: tuple[Path, ...]) -> None:
        """Remove closed files whose rows are in a batch on disk."""
        for path in paths:
            path.unlink(missing_ok=True)
        self._closed_files = tuple(path for path in self._closed_files if path not in paths)

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _start_file(self) -> bool:
        path = self._folder / f"rows.{self._number + 1:09d}"
        began_s = self._clock()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._log_error(str(error))
            return False
        finally:
            self._rest_if_slow(began_s)
        self._file = new_journal_file(descriptor, BYTES_MAX)
        self._number += 1
        self._path = path
        self._has_rows = False
        return True

    def _rest_if_slow(self, began_s: float) -> None:
        now_s = self._clock()
        if now_s - began_s < SLOW_S:
            return
        is_new = began_s > self._rests_until_s + REST_S
        self._rests_until_s = now_s + REST_S
        if is_new:
            fields = {"folder": str(self._folder), "took_s": round(now_s - began_s, 2)}
            log.warning("slow disk: usage is not journaled for a while", extra={"fields": fields})

    def _log_error(self, reason: str) -> None:
        # Once per reason: a disk that is full for an hour must not fill the logs too.
        if reason != self._last_error:
            fields = {"folder": str(self._folder), "reason": reason}
            log.warning("cannot journal usage, it stays in memory", extra={"fields": fields})
        self._last_error = reason


def read_rows(path: Path) -> list[UsageRow]:
    """Return the complete rows of a file; the last one is torn if the process was killed.

    After a power cut, the bytes after them may be anything.
    """
    rows: list[UsageRow] = []
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=BYTES_MAX * 2)
        try:
            # One at a time: bytes that are no row must not lose the rows before them.
            for fields in unpacker:
                if fields == 0:
                    break  # Space for more rows.
                rows.append(msgspec.convert(fields, UsageRow))
        except (msgpack.UnpackException, msgspec.ValidationError, ValueError) as error:
            log.warning("torn journal", extra={"fields": {"path": path.name, "why": str(error)}})
    return rows
