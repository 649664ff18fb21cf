"""Files that survive a crash: written aside, synced, renamed; snapshots also sealed by a digest.

A service keeps its state folder to itself: two on one would take over, and end, each other's work.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from isochrone.service.config import ConfigError

_MAGIC: Final = b"isochrone-snapshot-1\n"


@contextmanager
def lock_state_folder(folder: Path) -> Iterator[None]:
    """Keep a state folder to this process, or raise ConfigError. Nothing is written for it."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot use the state folder {folder}: {why}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"cannot use the state folder {folder}: another process does; is it running already?"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot keep the state folder {folder} to this process: {error.strerror}; put it on a "
            "file system that can lock, as a local disk's"
        ) from error
    else:
        yield
    finally:
        os.close(descriptor)


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
    """Return the newest snapshot that is whole, falling back to the one before; None if neither.

    Raises ConfigError where one is there that may not, or cannot, be read, and no other.
    """
    unreadable: OSError | None = None
    for candidate in (path, path.with_name(f"{path.name}.prev")):
        try:
            payload = _unseal(candidate.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            unreadable = unreadable or error
            continue
        if payload is not None:
            return payload
    if unreadable is not None:
        raise ConfigError(f"cannot read {unreadable.filename}: {unreadable.strerror}")
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
