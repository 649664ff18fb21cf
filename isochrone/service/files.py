"""Files that survive a crash: written to a temporary file, synced, renamed.

A snapshot also carries a digest, so that a torn file is recognised. A service locks its state
folder: two services on one folder would take over, and end, each other's engines.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from isochrone.service.config import ConfigError

_SNAPSHOT_MAGIC: Final = b"isochrone-snapshot-1\n"


@contextmanager
def lock_state_folder(folder: Path) -> Iterator[None]:
    """Create a state folder and lock it for this process; raises ConfigError.

    The lock is on the folder itself; no lock file is written.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot use the state folder {folder}: {reason}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"cannot use the state folder {folder}: another process uses it; is the service "
            "running already?"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot lock the state folder {folder}: {error.strerror}; put it on a file system "
            "that supports locks, such as a local disk"
        ) from error
    else:
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a state folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the contents of `path`; after a crash either the old or the new file is complete."""
    _replace_file(path, lambda file: file.write(data), mode)


def _replace_file(
    path: Path,
    write: Callable[[BinaryIO], object],
    mode: int = 0o600,
    before_replacing: Callable[[], object] = lambda: None,
) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        before_replacing()
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not error.filename:
            # The error of a full disk names no file.
            error.filename = str(path)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_snapshot(path: Path, payload: bytes | Iterable[bytes]) -> None:
    """Write `payload` with its digest; keep the previous snapshot as `<name>.prev`.

    A large payload is given in pieces, so that it need not be in memory as a whole.
    """
    pieces = (payload,) if isinstance(payload, bytes) else payload
    # Only once the new one is complete: if the present one is torn, the previous one is all that
    # is left should the disk be full, or the process killed meanwhile.
    _replace_file(
        path,
        lambda file: _write_with_digest(file, pieces),
        before_replacing=lambda: _keep_previous(path),
    )


def _keep_previous(path: Path) -> None:
    if path.exists():
        previous = path.with_name(f"{path.name}.prev")
        linked = path.with_name(f".{path.name}.{os.getpid()}.prev")
        linked.unlink(missing_ok=True)
        linked.hardlink_to(path)
        linked.replace(previous)


def _write_with_digest(file: BinaryIO, pieces: Iterable[bytes]) -> None:
    digest = hashlib.sha256()
    file.write(_SNAPSHOT_MAGIC + bytes(digest.digest_size))
    for piece in pieces:
        digest.update(piece)
        file.write(piece)
    file.seek(len(_SNAPSHOT_MAGIC))
    file.write(digest.digest())


def read_snapshot(path: Path) -> memoryview | None:
    """Return the newest intact snapshot, else the previous one, else None.

    Raises ConfigError if a snapshot exists but cannot be read, and the other is not intact.
    """
    unreadable: OSError | None = None
    for candidate in (path, path.with_name(f"{path.name}.prev")):
        try:
            payload = _verified_payload(candidate.read_bytes())
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


def _verified_payload(data: bytes) -> memoryview | None:
    start = len(_SNAPSHOT_MAGIC) + hashlib.sha256().digest_size
    # A view: the payload may be hundreds of megabytes.
    payload = memoryview(data)[start:]
    if (
        data[: len(_SNAPSHOT_MAGIC)] != _SNAPSHOT_MAGIC
        or hashlib.sha256(payload).digest() != data[len(_SNAPSHOT_MAGIC) : start]
    ):
        return None
    return payload
