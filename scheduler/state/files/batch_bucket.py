"""The contents of files of the public API in an S3-compatible bucket: one object each.

Uses obstore (`pip install 'isochrone[s3]'`), whose calls block as a file system's do. Credentials
come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), or from
the machine's role. A file is on the local disk while it arrives and uploaded in parts when it is
complete; a bucket shows an object only then. A file is read in ranges, or as a stream from a server
that does not answer ranges with status 206 (rclone's), and is never in memory as a whole.
"""

import io
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.decide.unnamed_contents import ListingRefused, StoredContents
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.files.whole_objects import WholeObject

log = logging.getLogger(__name__)

PART_BYTES: Final = 8 * 1024 * 1024
"""How much of a file is in memory while it is uploaded, for each of PARTS_AT_ONCE."""

PARTS_AT_ONCE: Final = 2
READ_BYTES: Final = 4 * 1024 * 1024
RETRY_AFTER_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 5
REQUEST_TIMEOUT_S: Final = 60
RETRIES_MAX: Final = 3
RETRY_TIMEOUT_S: Final = 20

NO_PARTIAL_CONTENT: Final = "non-partial response"
"""The error that obstore reports if a server answers a request for a range with status 200."""

REFUSED: Final = "status code: 403"
"""Part of the error that obstore reports if the credentials may not list."""

SCHEME: Final = "s3://"

SPOOL_FREE_BYTES_MIN: Final = 64 * 1024 * 1024
"""Uploads leave this much of the spool folder's disk free."""


class BatchBucket(BatchFolder):
    """Reads and writes objects below a prefix. Raises ApiError 503 while the bucket fails."""

    def __init__(self, url: str, spool: Path | None, *, endpoint: str, region: str) -> None:
        """Use `s3://bucket/prefix`. `spool` is where files lie while they arrive.

        Raises OSError if obstore is missing or the URL is none of a bucket.
        """
        if not url.startswith(SCHEME) or not url.removeprefix(SCHEME).strip("/"):
            raise OSError(f"{url!r} is not of the form s3://bucket/prefix")
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import S3Store
        except ImportError as error:
            raise OSError("obstore is missing: pip install 'isochrone[s3]'") from error
        super().__init__(spool or Path(tempfile.gettempdir()), SPOOL_FREE_BYTES_MIN)
        self._url = url
        self._spool = spool
        self._server = _BucketServer()
        self._obstore: Any = obstore
        self._exceptions: Any = exceptions
        place: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        try:
            self._store: Any = S3Store.from_url(
                url,
                region=region or "us-east-1",
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                    "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
                },
                retry_config={
                    "max_retries": RETRIES_MAX,
                    "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
                },
                **place,
            )
        except (exceptions.BaseError, ValueError) as error:
            raise OSError(_reason(error)) from error

    @property
    def has_ranges(self) -> bool:
        """Whether the server answers requests for ranges, as far as is known."""
        return self._server.has_ranges

    def prepare(self) -> None:
        """Check that objects can be written, read and deleted. Raises OSError if that is refused.

        A bucket that does not answer is logged only: a scheduler serves everything else without.
        """
        probe = "isochrone-write-probe"
        try:
            with tempfile.TemporaryFile(dir=self._spool):
                pass
        except OSError as error:
            spool = self._spool or tempfile.gettempdir()
            raise OSError(
                f"cannot write to batch_spool_folder {spool}: {error.strerror}"
            ) from error
        refused = (
            FileNotFoundError,
            self._exceptions.PermissionDeniedError,
            self._exceptions.UnauthenticatedError,
        )
        try:
            self._obstore.put(self._store, probe, b"1")
            # Another scheduler that starts may delete it meanwhile.
            with suppress(FileNotFoundError):
                self._obstore.get(self._store, probe).bytes()
            with suppress(FileNotFoundError):
                self._obstore.delete(self._store, probe)
        except refused as error:
            raise OSError(self._explain(error)) from error
        except self._exceptions.BaseError as error:
            fields = {"bucket": self._url, "reason": self._explain(error)}
            log.error(
                "cannot reach the bucket: requests for files fail until it answers",
                extra={"fields": fields},
            )

    def delete_unfinished(self) -> None:
        """Do nothing: a file that arrives has no name on disk."""

    def list_contents(self, after: str, count: int) -> list[StoredContents]:
        """Return the first `count` objects, by name, whose names come after `after`. Blocks.

        Raises ListingRefused, and ApiError 503.
        """
        listed: list[StoredContents] = []
        with self._failures(), self._listing():
            for part in self._obstore.list(self._store, offset=after or None):
                # Some servers send the names before `after`, too.
                listed += (
                    StoredContents(found["path"], found["last_modified"].timestamp())
                    for found in part
                    if found["path"] > after
                )
                if len(listed) >= count:
                    break
        return sorted(listed)[:count]

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """Raise ListingRefused if the credentials may not list."""
        try:
            yield
        except (self._exceptions.GenericError, self._exceptions.PermissionDeniedError) as error:
            if isinstance(error, self._exceptions.GenericError) and REFUSED not in str(error):
                raise
            raise ListingRefused(_reason(error)) from error

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file; at the end it is uploaded, and after an exception it is gone."""
        with tempfile.TemporaryFile(dir=self._spool) as file:
            yield file
            file.seek(0)
            try:
                with self._failures():
                    self._obstore.put(
                        self._store,
                        file_id,
                        file,
                        chunk_size=PART_BYTES,
                        max_concurrency=PARTS_AT_ONCE,
                    )
            except FileNotFoundError as error:
                raise self._unavailable(f"there is no such bucket ({error})") from error

    def open(self, file_id: str) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        with self._failures():
            size = self._obstore.head(self._store, file_id)["size"]
        reader: Any = io.BufferedReader(_ObjectReader(self, file_id, size), READ_BYTES)
        opened: BinaryIO = reader
        return opened

    @contextmanager
    def local(self, file_id: str) -> Iterator[BinaryIO]:
        """Copy a file to the spool folder. Raises FileNotFoundError."""
        with tempfile.TemporaryFile(dir=self._spool) as copy:
            with self.open(file_id) as source:
                shutil.copyfileobj(source, copy, READ_BYTES)
            copy.seek(0)
            yield copy

    def _read_parts(self, file_id: str, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        if not parts:
            return []
        starts = [offset for offset, _ in parts]
        lengths = [length for _, length in parts]
        if self.has_ranges:
            with self._failures(), self._ranges():
                found = self._obstore.get_ranges(
                    self._store, file_id, starts=starts, lengths=lengths
                )
                return [bytes(part) for part in found]
        whole = WholeObject(lambda: self.stream(file_id))
        in_order = {part: whole.read(*part) for part in sorted(set(parts))}
        return [in_order[part] for part in parts]

    def read_range(self, file_id: str, start: int, length: int) -> bytes | None:
        """Return a part of a file, or None if the server answers no ranges."""
        with self._failures(), self._ranges():
            if self.has_ranges:
                found = self._obstore.get_range(self._store, file_id, start=start, length=length)
                return bytes(found)
        return None

    def stream(self, file_id: str) -> Iterator[bytes]:
        """Yield the chunks of a file. Raises FileNotFoundError."""
        with self._failures():
            found = self._obstore.get(self._store, file_id)
            for chunk in found.stream(min_chunk_size=READ_BYTES):
                yield bytes(chunk)

    @contextmanager
    def _ranges(self) -> Iterator[None]:
        """Note, and log once, that the server answers no ranges."""
        try:
            yield
        except self._exceptions.GenericError as error:
            if NO_PARTIAL_CONTENT not in str(error):
                raise
            self._server.has_ranges = False
            log.warning(
                "the bucket's server does not answer ranges with status 206: files are read from"
                " their start",
                extra={"fields": {"bucket": self._url}},
            )

    def _delete(self, file_id: str) -> None:
        with suppress(FileNotFoundError), self._failures():
            self._obstore.delete(self._store, file_id)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise FileNotFoundError for a missing object, and ApiError 503 for other failures."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(_reason(error)) from error
        except self._exceptions.BaseError as error:
            log.warning(
                "bucket failed",
                extra={"fields": {"bucket": self._url, "reason": self._explain(error)}},
            )
            raise self._unavailable(self._explain(error)) from error

    def _unavailable(self, reason: str) -> ApiError:
        message = f"cannot use the bucket {self._url} of the scheduler: {reason}"
        return ApiError(ErrorCode.UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)

    def _explain(self, error: Exception) -> str:
        """Return why a request failed and what an operator does about it."""
        refused = (self._exceptions.PermissionDeniedError, self._exceptions.UnauthenticatedError)
        if isinstance(error, refused):
            return (
                "the store refuses the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or"
                f" the machine's role), or they may not do this: {_reason(error)}"
            )
        if isinstance(error, FileNotFoundError):
            return f"there is no such bucket, create it: {_reason(error)}"
        return _reason(error)


class _BucketServer:
    """The abilities of a bucket's server, for all tenants."""

    has_ranges = True


class _ObjectReader(io.RawIOBase):
    """One object as a file; each read is a request for a range, if the server answers them."""

    def __init__(self, bucket: BatchBucket, file_id: str, size_bytes: int) -> None:
        super().__init__()
        self._bucket = bucket
        self._file_id = file_id
        self._size_bytes = size_bytes
        self._position = 0
        self._whole = WholeObject(lambda: bucket.stream(file_id))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a byte of the file."""
        origin = {io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}.get(whence, 0)
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; return the number of bytes, 0 at the end."""
        count = min(len(buffer), self._size_bytes - self._position)
        if count <= 0:
            return 0
        part = self._bucket.read_range(self._file_id, self._position, count)
        if part is None:
            part = self._whole.read(self._position, count)
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def _reason(error: Exception) -> str:
    """Return the first line of what obstore reports, which names the bucket and the status."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
