"""The contents of files of the public API in an S3-compatible bucket: one object each.

Uses obstore (`pip install 'isochrone[s3]'`), whose calls block as a file system's do. Credentials
come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), or from
the machine's role. A file is on the local disk while it arrives and uploaded in parts when it is
complete; a bucket shows an object only then. It is read in ranges, never whole.
"""

import asyncio
import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.state.batch_folder import BatchFolder

PART_BYTES: Final = 8 * 1024 * 1024
"""How much of a file is in memory while it is uploaded, for each of PARTS_AT_ONCE."""

PARTS_AT_ONCE: Final = 2
READ_BYTES: Final = 1024 * 1024
RETRY_AFTER_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 60
RETRY_TIMEOUT_S: Final = 20
SCHEME: Final = "s3://"


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
        self._url = url
        self._spool = spool
        self._obstore: Any = obstore
        self._exceptions: Any = exceptions
        place: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        self._store: Any = S3Store.from_url(
            url,
            region=region or "us-east-1",
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)},
            **place,
        )

    def prepare(self) -> None:
        """Check that the bucket is there and may be read and written. Raises OSError."""
        probe = "isochrone-write-probe"
        try:
            self._obstore.put(self._store, probe, b"1")
            self._obstore.delete(self._store, probe)
        except self._exceptions.BaseError as error:
            raise OSError(_reason(error)) from error

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file; at the end it is uploaded, and after an exception it is gone."""
        with tempfile.TemporaryFile(dir=self._spool) as file:
            yield file
            file.seek(0)
            with self._failures():
                self._obstore.put(
                    self._store,
                    file_id,
                    file,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )

    def open(self, file_id: str) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        with self._failures():
            size = self._obstore.head(self._store, file_id)["size"]
        reader: Any = io.BufferedReader(_ObjectReader(self, file_id, size), READ_BYTES)
        opened: BinaryIO = reader
        return opened

    def read_range(self, file_id: str, start: int, length: int) -> bytes:
        """Return a part of a file. Raises FileNotFoundError."""
        with self._failures():
            found = self._obstore.get_range(self._store, file_id, start=start, length=length)
            return bytes(found)

    def _read_parts(self, file_id: str, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        if not parts:
            return []
        starts = [offset for offset, _ in parts]
        lengths = [length for _, length in parts]
        with self._failures():
            found = self._obstore.get_ranges(self._store, file_id, starts=starts, lengths=lengths)
            return [bytes(part) for part in found]

    async def delete(self, file_id: str) -> None:
        """Delete a file, if it is there."""
        await asyncio.to_thread(self._delete, file_id)

    def _delete(self, file_id: str) -> None:
        try:
            with self._failures():
                self._obstore.delete(self._store, file_id)
        except FileNotFoundError:
            return

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise FileNotFoundError for a missing object, and ApiError 503 for other failures."""
        try:
            yield
        except (self._exceptions.NotFoundError, FileNotFoundError) as error:
            raise FileNotFoundError(str(error)[:200]) from error
        except self._exceptions.BaseError as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                f"cannot use the bucket {self._url} of the scheduler: {_reason(error)}",
                retry_after_s=RETRY_AFTER_S,
            ) from error


class _ObjectReader(io.RawIOBase):
    """One object as a file; each read is a request for a range."""

    def __init__(self, bucket: BatchBucket, file_id: str, size_bytes: int) -> None:
        super().__init__()
        self._bucket = bucket
        self._file_id = file_id
        self._size_bytes = size_bytes
        self._position = 0

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
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def _reason(error: Exception) -> str:
    """Return the first line of what obstore reports, which names the bucket and the status."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
