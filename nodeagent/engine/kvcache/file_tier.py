"""The file tier: one checksummed file per KV block, in one folder per model, bounded in bytes.

Rule 1: a file is written under a temporary name and renamed, and its checksum is verified when it
is read: a crash, a full disk or a flipped bit costs a recomputation and nothing else.
Rule 2: nothing is synced. Blocks that a crash of the machine loses are computed again.
Rule 3: the bytes of the folder are bounded; the least recently used files are deleted first.
"""

import errno
import logging
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final

from nodeagent.engine.kvcache.block_seal import DIGEST_BYTES, SEAL_BYTES, seal

log = logging.getLogger(__name__)

TAKES_NOTHING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that may take files again later, so that an engine starts nevertheless."""


class FileTier:
    """The blocks of one model, all of one size, by digest. Safe to call from any thread."""

    def __init__(
        self, folder: Path, model_fingerprint: bytes, block_bytes: int, bytes_max: int
    ) -> None:
        self._model_fingerprint = model_fingerprint
        self._block_bytes = block_bytes
        self._files_max = bytes_max // (SEAL_BYTES + block_bytes)
        self._folder = folder / model_fingerprint.hex()
        self._files: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self.corrupt_total = 0
        self.refused_total = 0
        """Blocks that the disk did not take."""
        self._last_write_failed = False
        """Set while writes fail, so that only the first failure is logged."""
        # Without the folder nothing is written yet; each write tries to make it.
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            if error.errno not in TAKES_NOTHING:
                raise
            self._note_failure(self._folder, error)
        self._index_existing()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, digest: object) -> bool:
        return digest in self._files

    @property
    def used_bytes(self) -> int:
        """The bytes of all files."""
        return len(self._files) * (SEAL_BYTES + self._block_bytes)

    def write(self, digest: bytes, content: bytes | memoryview) -> bool:
        """Store a block; return False if the disk refuses it."""
        path = self._path(digest)
        header = seal(self._model_fingerprint, digest, content)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(header)
                file.write(content)
            temporary.replace(path)
        except OSError as error:
            _remove(temporary)
            self.refused_total += 1
            self._note_failure(path, error)
            return False
        if self._last_write_failed:
            log.info("KV blocks can be written again", extra={"fields": {"path": str(path)}})
        self._last_write_failed = False
        self._add(digest)
        return True

    def prefetch(self, digest: bytes) -> None:
        """Ask the system to start reading the file of a block into the page cache."""
        try:
            descriptor = os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # The file may have been deleted; `read` handles that.
            return
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def read(self, digest: bytes) -> bytearray | None:
        """Return the content of a block, or None if its file is gone or corrupt."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                header = file.read(SEAL_BYTES)
                # Reads one block at most, however large the file has become.
                content = bytearray(self._block_bytes)
                is_whole = file.readinto(content) == len(content) and not file.read(1)
        except OSError:
            # Another process that uses this folder may have deleted the file.
            self._forget(digest)
            return None
        if not is_whole or header != seal(self._model_fingerprint, digest, content):
            self.corrupt_total += 1
            _remove(path)
            self._forget(digest)
            return None
        with self._lock:
            if digest in self._files:
                self._files.move_to_end(digest)
        return content

    def _note_failure(self, path: Path, error: OSError) -> None:
        if not self._last_write_failed:
            fields = {"path": str(path), "why": str(error)}
            log.warning("cannot write a KV block", extra={"fields": fields})
        self._last_write_failed = True

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name

    def _add(self, digest: bytes) -> None:
        evicted: list[bytes] = []
        with self._lock:
            self._files[digest] = None
            self._files.move_to_end(digest)
            while len(self._files) > self._files_max:
                evicted.append(self._files.popitem(last=False)[0])
        for oldest in evicted:
            _remove(self._path(oldest))

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._files.pop(digest, None)

    def _index_existing(self) -> None:
        """Index the files of earlier processes, oldest first; delete what is not a whole block."""
        found: list[tuple[float, bytes]] = []
        for path in self._folder.glob("*/*"):
            try:
                digest = bytes.fromhex(path.name)
            except ValueError:
                _remove(path)
                continue
            with suppress(FileNotFoundError):
                # Another process that uses this folder may have deleted the file.
                stat = path.stat()
                file_bytes = SEAL_BYTES + self._block_bytes
                if (len(digest), stat.st_size) == (DIGEST_BYTES, file_bytes):
                    found.append((stat.st_mtime, digest))
                else:
                    _remove(path)
        for _, digest in sorted(found):
            self._add(digest)


def _remove(path: Path) -> None:
    """Delete a file; if the disk refuses, the next process tries again."""
    with suppress(OSError):
        path.unlink()
