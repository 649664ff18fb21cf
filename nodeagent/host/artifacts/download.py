"""Writes one file of an artifact and verifies it against the manifest while the bytes arrive.

Bytes are hashed as they are written, so that nothing is read a second time. Only a cloned file, and
a download that resumes bytes of an earlier run, are read once more when complete.
"""

import fcntl
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from isochrone.service.threads import run_to_completion
from isochrone.wire.models.model import ArtifactFile
from nodeagent.decide.bandwidth import MinimumRate, SlowSenderDetector
from nodeagent.host.artifacts.link import TransferLink

READ_BYTES: Final = 4 * 1024 * 1024
PICKLE_MAGICS: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
FICLONE: Final = 0x40049409


class ArtifactError(Exception):
    """An artifact cannot be fetched; the message says why and what to do."""


class TransferCut(Exception):
    """A sender broke off or was too slow. The bytes so far are kept and can be resumed."""


class TransferTooLong(Exception):
    """A sender sent more bytes than the manifest allows. All of them are discarded."""


class _RunningDigest:
    """The size, first bytes and SHA-256 of a file so far, from its first byte on."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._head = b""
        self._sha256 = hashlib.sha256()

    def write(self, chunk: bytes, out: BinaryIO | None) -> None:
        """Write the next chunk to `out`, if given, and hash it."""
        if out is not None:
            out.write(chunk)
        self._head = (self._head + chunk[:4])[:4]
        self._sha256.update(chunk)
        self.size_bytes += len(chunk)

    def problem(self, file: ArtifactFile) -> str:
        """Return how the hashed bytes differ from the manifest's file, or ""."""
        sha256 = self._sha256.hexdigest()
        if self._head.startswith(PICKLE_MAGICS):
            return (
                f"cannot accept {file.path}: its content is a pickle or an archive; use "
                "safetensors or GGUF"
            )
        if self.size_bytes != file.size_bytes:
            return (
                f"cannot accept {file.path}: it has {self.size_bytes} bytes, the manifest says "
                f"{file.size_bytes}"
            )
        if sha256 != file.sha256:
            return (
                f"cannot accept {file.path}: its SHA-256 is {sha256}, the manifest says "
                f"{file.sha256}; correct the origin or the manifest"
            )
        return ""


@dataclass(eq=False)
class FileDownload:
    """One file of an artifact on its way to `path`, over `link`.

    `digest` is the artifact's; `on_progress` gets the bytes of this file so far.
    """

    digest: str
    file: ArtifactFile
    path: Path
    on_progress: Callable[[int], None]
    link: TransferLink
    _hashed: _RunningDigest = field(default_factory=_RunningDigest, init=False)

    def partial_bytes(self) -> int:
        """Return how much of the file is on disk; a file that is too long is deleted."""
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        if size_bytes <= self.file.size_bytes:
            return size_bytes
        self.path.unlink()
        return 0

    async def is_complete(self) -> bool:
        """Return True if the file is on disk with the right size and SHA-256."""
        has_size = self.path.exists() and self.path.stat().st_size == self.file.size_bytes
        return has_size and not await self._verify()

    async def copy(self, source: Path) -> None:
        """Copy a file of this machine. Raises ArtifactError if it is not the manifest's."""
        if source.is_symlink():
            raise ArtifactError(f"cannot copy {source.name}: it is a symbolic link, not a file")
        if not source.is_file():
            raise ArtifactError(f"cannot copy {source}: there is no such file")
        self._hashed, is_clone = _RunningDigest(), False
        # Never a hard link: a later write to the source would change the verified file. A clone
        # (reflink) shares blocks until one side is written, if the file system supports it.
        with source.open("rb") as opened, self.path.open("wb") as out:
            with suppress(OSError):
                is_clone = await run_to_completion(fcntl.ioctl, out, FICLONE, opened.fileno()) == 0
            if not is_clone:
                await self._hash_file(opened, out)
        problem = await self._verify()
        if problem:
            raise ArtifactError(problem)

    async def append(
        self,
        chunks: AsyncIterator[bytes],
        offset: int,
        minimum_rate: MinimumRate,
        *,
        is_far: bool,
    ) -> str:
        """Write `chunks` from `offset` (0 or the current size); return what is wrong, or "".

        Raises TransferCut if the chunks end early or are slower than `minimum_rate`, and
        TransferTooLong. Transfers from far away (`is_far`) measure the rate of the link.
        """
        clock, size_bytes = self.link.clock, offset
        start_s = clock()
        detector = SlowSenderDetector(minimum_rate, start_s)
        if not offset:
            self._hashed = _RunningDigest()
        write = self._hashed.write if offset == self._hashed.size_bytes else _write_unhashed
        with self.path.open("ab" if offset else "wb") as out:
            async for chunk in chunks:
                size_bytes += len(chunk)
                if size_bytes > self.file.size_bytes:
                    self.path.unlink()
                    raise TransferTooLong(
                        f"the sender sends more than the {self.file.size_bytes} bytes of the "
                        "manifest"
                    )
                await run_to_completion(write, chunk, out)
                self.on_progress(size_bytes)
                excused_s = await self.link.throttle(len(chunk))
                if detector.is_slow(len(chunk), clock(), excused_s):
                    raise TransferCut(
                        f"the sender is slower than {minimum_rate.bytes_per_s:g} bytes/s"
                    )
        if size_bytes < self.file.size_bytes:
            raise TransferCut(
                f"the transfer ended after {size_bytes} of {self.file.size_bytes} bytes"
            )
        if is_far:
            self.link.record(size_bytes - offset, clock() - start_s)
        return await self._verify()

    async def _hash_file(self, file: BinaryIO, out: BinaryIO | None = None) -> None:
        """Hash an open file, copying it to `out` if given.

        The file is read in chunks, so that a cancellation does not wait for the whole file.
        """
        while self._hashed.size_bytes <= self.file.size_bytes:
            chunk = await run_to_completion(file.read, READ_BYTES)
            if not chunk:
                return
            await run_to_completion(self._hashed.write, chunk, out)
            if out is not None:
                self.on_progress(self._hashed.size_bytes)

    async def _verify(self) -> str:
        """Return what is wrong with the file on disk, or "". A wrong file is deleted."""
        if self._hashed.size_bytes != self.path.stat().st_size:
            self._hashed = _RunningDigest()
            with self.path.open("rb") as file:
                await self._hash_file(file)
        problem = self._hashed.problem(self.file)
        if problem:
            # Nothing can be resumed from a file that failed verification.
            self.path.unlink(missing_ok=True)
        return problem


def _write_unhashed(chunk: bytes, out: BinaryIO) -> None:
    """Write a chunk of a resumed file; the whole file is hashed when it is complete."""
    out.write(chunk)
