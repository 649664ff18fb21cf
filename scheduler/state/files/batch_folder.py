"""The contents of files of the public API: one file of a folder each, streamed and never whole.

Every scheduler of a cluster uses the same folder (a shared file system). A file appears under its
name only when it is complete and on disk.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from isochrone.wire.errors import ApiError

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 * 1024
FREE_BYTES_MIN: Final = 1 << 30
"""Uploads leave this much of the disk free: batches that run write their results there, and it may
be the database's disk. Each tenant has a limit of its own, but there may be any number of them."""

UNFINISHED: Final = ".part"
UNFINISHED_S: Final = 86_400.0


class BatchFolder:
    """Reads and writes files by id. Its methods block; those named `async` use a thread."""

    def __init__(self, folder: Path, free_bytes_min: int = FREE_BYTES_MIN) -> None:
        """`free_bytes_min` of the disk are not for uploads."""
        self._folder = folder
        self._free_bytes_min = free_bytes_min

    def prepare(self) -> None:
        """Create the folder, and delete what a process left unfinished long ago.

        Another scheduler may be writing: its files are younger.
        """
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        for path in self._folder.glob(f"*{UNFINISHED}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > UNFINISHED_S:
                    path.unlink()

    def has_room(self) -> bool:
        """Return whether the disk has room for uploads. Blocks."""
        return shutil.disk_usage(self._folder).free > self._free_bytes_min

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file; at the end it is complete, and after an exception it is gone."""
        part = self._folder / f"{file_id}{UNFINISHED}"
        try:
            with part.open("xb") as output:
                yield output
                output.flush()
                os.fsync(output.fileno())
            part.rename(self._path(file_id))
        finally:
            part.unlink(missing_ok=True)

    def open(self, file_id: str) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        return self._path(file_id).open("rb")

    async def read_parts(self, file_id: str, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of a file, each given by its offset and its length."""
        return await asyncio.to_thread(self._read_parts, file_id, parts)

    def _read_parts(self, file_id: str, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.open(file_id) as source:
            return [os.pread(source.fileno(), length, offset) for offset, length in parts]

    async def delete(self, file_id: str) -> None:
        """Delete a file, if it is there."""
        await asyncio.to_thread(self._path(file_id).unlink, missing_ok=True)

    async def discard(self, file_id: str) -> None:
        """Delete a file that nothing names, after a failure; log if that fails too."""
        try:
            await self.delete(file_id)
        except (ApiError, OSError) as error:
            fields = {"file": file_id, "reason": str(error)}
            log.warning("cannot delete a file that nothing names", extra={"fields": fields})

    def _path(self, file_id: str) -> Path:
        return self._folder / file_id
