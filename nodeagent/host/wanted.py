"""One file of an artifact on its way here: put together, and held to its manifest as it comes.

Rule: nothing is read twice. What is copied or sent is digested on its way; only a clone, and what
goes on from bytes of an earlier life, is read for it, once it is whole.
"""

import fcntl
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from isochrone.service.threads import run_to_completion
from isochrone.wire.model import ArtifactFile
from nodeagent.decide.bandwidth import Pace, Watermark
from nodeagent.host.link import Link

READ_BYTES: Final = 4 * 1024 * 1024
PICKLE_MAGICS: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
FICLONE: Final = 0x40049409


class ArtifactError(Exception):
    """The artifact cannot be had; the message says why and what to do."""


class Cut(Exception):
    """Who sends broke off, or was let go; what came is kept, and may be gone on from."""


class TooLong(Exception):
    """Who sends goes on past what the manifest says; nothing is kept."""


class Wanted:
    """What is wanted, where it is put together, whom to tell of it, and the link it comes over."""

    def __init__(
        self, digest: str, file: ArtifactFile, path: Path, tell: Callable[[int], None], link: Link
    ) -> None:
        self.digest = digest
        self.file = file
        self.link = link
        self._path = path
        self._tell = tell
        self._seen = _Seen()

    def held_bytes(self) -> int:
        """Return how much of the file is here; what is longer than the file is dropped."""
        size_bytes = self._path.stat().st_size if self._path.exists() else 0
        if size_bytes <= self.file.size_bytes:
            return size_bytes
        self._path.unlink()
        return 0

    async def is_here(self) -> bool:
        """Say whether the whole file is here, and is what it should be."""
        is_whole = self._path.exists() and self._path.stat().st_size == self.file.size_bytes
        return is_whole and not await self._verdict()

    async def copy(self, source: Path) -> None:
        """Take a file of this machine, or raise ArtifactError."""
        if source.is_symlink():
            raise ArtifactError(f"cannot take {source.name}: a symbolic link, not a file")
        if not source.is_file():
            raise ArtifactError(f"cannot take {source}: no such file")
        self._seen, is_clone = _Seen(), False
        # Never a link: who writes into the source would change what was verified. A clone shares
        # its blocks until then, where the file system can.
        with source.open("rb") as opened, self._path.open("wb") as out:
            with suppress(OSError):
                is_clone = await run_to_completion(fcntl.ioctl, out, FICLONE, opened.fileno()) == 0
            if not is_clone:
                await self._see(opened, out)
        problem = await self._verdict()
        if problem:
            raise ArtifactError(problem)

    async def append(
        self, chunks: AsyncIterator[bytes], offset: int, pace: Pace, *, is_far: bool
    ) -> str:
        """Take what comes from `offset` on, from 0 or after what is here; say what is then wrong.

        Raises Cut where it ends before its time or is slower than `pace`, and TooLong. What comes
        from afar shows how fast the link is.
        """
        clock, size_bytes = self.link.clock, offset
        began = clock()
        watermark = Watermark(pace, began)
        if not offset:
            self._seen = _Seen()
        take = self._seen.take if offset == self._seen.size_bytes else _write
        with self._path.open("ab" if offset else "wb") as out:
            async for chunk in chunks:
                size_bytes += len(chunk)
                if size_bytes > self.file.size_bytes:
                    self._path.unlink()
                    most = self.file.size_bytes
                    raise TooLong(f"it sends more than the {most} bytes of its manifest")
                await run_to_completion(take, chunk, out)
                self._tell(size_bytes)
                excused_s = await self.link.keep_pace(len(chunk))
                if watermark.is_slow(len(chunk), clock(), excused_s):
                    raise Cut(f"it sends less than {pace.least_bytes_per_s:g} bytes a second")
        if size_bytes < self.file.size_bytes:
            raise Cut(f"it ended after {size_bytes} of {self.file.size_bytes} bytes")
        if is_far:
            self.link.saw(size_bytes - offset, clock() - began)
        return await self._verdict()

    async def _see(self, file: BinaryIO, into: BinaryIO | None = None) -> None:
        """See an open file, and with `into` write it there: in pieces, lest a stop wait for it."""
        while self._seen.size_bytes <= self.file.size_bytes:
            chunk = await run_to_completion(file.read, READ_BYTES)
            if not chunk:
                return
            await run_to_completion(self._seen.take, chunk, into)
            if into is not None:
                self._tell(self._seen.size_bytes)

    async def _verdict(self) -> str:
        """Say what is wrong with the file that is here, "" if nothing. It is then dropped."""
        if self._seen.size_bytes != self._path.stat().st_size:
            self._seen = _Seen()
            with self._path.open("rb") as file:
                await self._see(file)
        problem = self._seen.problem(self.file)
        if problem:
            # What failed verification is worth nothing, not even to resume from.
            self._path.unlink(missing_ok=True)
        return problem


class _Seen:
    """What was seen of a file, from its beginning on."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._head = b""
        self._digest = hashlib.sha256()

    def take(self, chunk: bytes, into: BinaryIO | None) -> None:
        """See what comes next, once it is written where it belongs."""
        if into is not None:
            into.write(chunk)
        self._head = (self._head + chunk[:4])[:4]
        self._digest.update(chunk)
        self.size_bytes += len(chunk)

    def problem(self, file: ArtifactFile) -> str:
        """Say in words how it is not the file of the manifest; "" if it is."""
        digest = self._digest.hexdigest()
        if self._head.startswith(PICKLE_MAGICS):
            return f"cannot take {file.path}: it is a pickle or an archive, whatever its name says"
        if self.size_bytes != file.size_bytes:
            return (
                f"cannot take {file.path}: {self.size_bytes} bytes, its manifest says "
                f"{file.size_bytes}"
            )
        if digest != file.sha256:
            return (
                f"cannot take {file.path}: its SHA-256 is {digest}, the manifest says "
                f"{file.sha256}; the origin or the manifest is wrong"
            )
        return ""


def _write(chunk: bytes, into: BinaryIO) -> None:
    """Write what is not seen from its beginning; it will be read once it is whole."""
    into.write(chunk)
