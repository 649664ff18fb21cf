"""Files that survive a crash: written aside, synced, renamed; snapshots also sealed by a digest."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_MAGIC: Final = b"isochrone-snapshot-1\n"


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`: after a crash either the old or the new file is there, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and not error.filename:
            # A full disk does not say whose write it refused.
            error.filename = str(path)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make durable what a file holds, or which names a folder has."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_snapshot(path: Path, payload: bytes) -> None:
    """Write `payload` sealed by its digest, keeping the one before as `<name>.prev`."""
    if path.exists():
        previous = path.with_name(f"{path.name}.prev")
        linked = path.with_name(f".{path.name}.{os.getpid()}.prev")
        linked.unlink(missing_ok=True)
        linked.hardlink_to(path)
        linked.replace(previous)
    write_atomic(path, _MAGIC + hashlib.sha256(payload).digest() + payload)


def read_snapshot(path: Path) -> bytes | None:
    """Return the newest snapshot that is whole, falling back to the one before; None if neither."""
    for candidate in (path, path.with_name(f"{path.name}.prev")):
        with suppress(FileNotFoundError):
            payload = _unseal(candidate.read_bytes())
            if payload is not None:
                return payload
    return None


def _unseal(data: bytes) -> bytes | None:
    start = len(_MAGIC) + hashlib.sha256().digest_size
    payload = data[start:]
    if (
        data[: len(_MAGIC)] != _MAGIC
        or hashlib.sha256(payload).digest() != data[len(_MAGIC) : start]
    ):
        return None
    return payload
