"""The file tier: one sealed file for each block, in a folder for each model, bounded in bytes.

Rule 1: a file is written aside and renamed, and read only if its seal holds: a crash, a full disk
or a flipped bit costs a recomputation and nothing else.
Rule 2: nothing is synced. What the disk forgets is computed again.
Rule 3: the folder's bytes are bounded; the least recently used files go first.
"""

import logging
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

log = logging.getLogger(__name__)

_MAGIC: Final = b"isochrone-kv-1\n"
_SEAL_BYTES: Final = 16
_DIGEST_BYTES: Final = 32
_HEAD_BYTES: Final = len(_MAGIC) + _DIGEST_BYTES + _SEAL_BYTES


class FileTier:
    """Blocks of one model, all of a size, by digest. Any thread may call."""

    def __init__(self, folder: Path, model: bytes, block_bytes: int, bytes_max: int) -> None:
        self._model = model
        self._block_bytes = block_bytes
        self._files_max = bytes_max // (_HEAD_BYTES + block_bytes)
        self._folder = folder / model.hex()
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self.spoilt_total = 0
        self._refusing = False
        """Whether the disk did not take the last block: that is said once, not of each."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._adopt()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: object) -> bool:
        return digest in self._held

    @property
    def held_bytes(self) -> int:
        """What the files take."""
        return len(self._held) * (_HEAD_BYTES + self._block_bytes)

    def write(self, digest: bytes, content: bytes | memoryview) -> bool:
        """Keep a block; False where the disk does not take it."""
        path = self._path(digest)
        head = _MAGIC + digest + self._seal(digest, content)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with os.fdopen(os.open(aside, flags, 0o600), "wb") as file:
                file.write(head)
                file.write(content)
            aside.replace(path)
        except OSError as error:
            _remove(aside)
            if not self._refusing:
                fields = {"path": str(path), "why": str(error)}
                log.warning("cannot keep KV", extra={"fields": fields})
            self._refusing = True
            return False
        self._refusing = False
        self._note(digest)
        return True

    def expect(self, digest: bytes) -> None:
        """Have the disk begin to read a block that is wanted soon, where it is still here."""
        try:
            descriptor = os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # Whoever reads it finds out that it is gone.
            return
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def read(self, digest: bytes) -> bytearray | None:
        """Return a block's content, or None where it is gone or its seal is broken."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                # No more than a block, however large the file has become.
                content = bytearray(self._block_bytes)
                is_whole = file.readinto(content) == len(content) and not file.read(1)
        except OSError:
            # Another process of this folder may have made room.
            self._forget(digest)
            return None
        if not is_whole or head != _MAGIC + digest + self._seal(digest, content):
            self.spoilt_total += 1
            _remove(path)
            self._forget(digest)
            return None
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
        return content

    def _seal(self, digest: bytes, content: bytes | bytearray | memoryview) -> bytes:
        seal = xxhash.xxh3_128(self._model + digest)
        seal.update(content)
        return seal.digest()

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._folder / name[:2] / name

    def _note(self, digest: bytes) -> None:
        gone: list[bytes] = []
        with self._lock:
            self._held[digest] = None
            self._held.move_to_end(digest)
            while len(self._held) > self._files_max:
                gone.append(self._held.popitem(last=False)[0])
        for oldest in gone:
            _remove(self._path(oldest))

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._held.pop(digest, None)

    def _adopt(self) -> None:
        """Take over what an earlier process left, oldest first; remove what is no whole block."""
        found: list[tuple[float, bytes]] = []
        for path in self._folder.glob("*/*"):
            try:
                digest = bytes.fromhex(path.name)
            except ValueError:
                _remove(path)
                continue
            with suppress(FileNotFoundError):
                # Another process of this folder may have made room.
                stat = path.stat()
                whole = _HEAD_BYTES + self._block_bytes
                if (len(digest), stat.st_size) == (_DIGEST_BYTES, whole):
                    found.append((stat.st_mtime, digest))
                else:
                    _remove(path)
        for _, digest in sorted(found):
            self._note(digest)


def _remove(path: Path) -> None:
    """Remove a file where the disk lets go of it; where it does not, the next process tries."""
    with suppress(OSError):
        path.unlink()
