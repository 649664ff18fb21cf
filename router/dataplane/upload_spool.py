"""Keeps uploaded files on disk while they arrive: they are too large for memory.

A file has no name, so nothing of it is left when the process ends. Parts are written as they come:
a write copies them to the page cache.

An upload may take long to arrive, so one tenant's may not use all of the space.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from router.config import RouterConfig
from router.dataplane.http_messages import HttpRequest

FILE_PATHS: Final = ("/v1/files", "/ai/v1/files")
AUDIO_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Also below `/ai`, and below an account."""
ADAPTER_PATH: Final = "/finetune-assets"


class SpooledBody:
    """One upload on disk."""

    def __init__(
        self, spool: "UploadSpool", file: BinaryIO, bytes_max: int, tenant_id: TenantId
    ) -> None:
        self.bytes_max = bytes_max
        self._spool = spool
        self._tenant_id = tenant_id
        self._file = file
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        """Append a part. Raises ApiError if the disk or a limit of uploads is full."""
        self._spool.take(self._tenant_id, len(data))
        self.size_bytes += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise _disk_failed(error) from error

    def reader(self) -> BinaryIO:
        """Return a file to read the body from, which the reader closes."""
        try:
            self._file.flush()
            return os.fdopen(os.dup(self._file.fileno()), "rb", closefd=True)
        except OSError as error:
            raise _disk_failed(error) from error
        finally:
            if not self._file.closed:
                os.lseek(self._file.fileno(), 0, os.SEEK_SET)

    def read(self) -> bytes:
        """Return the whole body. Raises ApiError. Blocks."""
        with self.reader() as file:
            try:
                return file.read()
            except OSError as error:
                raise _disk_failed(error) from error

    def close(self) -> None:
        """Drop the body. A second call has no effect."""
        self._spool.give_back(self._tenant_id, self.size_bytes)
        self.size_bytes = 0
        # It writes what it has not written yet, and the disk may be full; it is closed even then.
        with suppress(OSError):
            self._file.close()


class UploadSpool:
    """The uploads of one process."""

    def __init__(self, folder: Path, config: RouterConfig) -> None:
        self._folder = folder
        self._file_bytes_max = config.upload_bytes_max
        self._audio_bytes_max = config.audio_bytes_max
        self._adapter_bytes_max = config.adapter_bytes_max
        self._tenant_bytes_max = config.uploads_bytes_per_tenant_max
        self._all_bytes_max = config.uploads_bytes_max
        self._size_bytes = 0
        self._by_tenant: dict[TenantId, int] = {}

    def open(self, request: HttpRequest) -> SpooledBody | None:
        """Return where the body of an authorized upload is kept; None for other requests."""
        if request.key is None or request.method != b"POST":
            return None
        bytes_max = self._limit(request.path)
        if not bytes_max:
            return None
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot read the upload: it must not be compressed as a whole",
            )
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise _disk_failed(error) from error
        return SpooledBody(self, file, bytes_max, request.key.tenant_id)

    def _limit(self, path: str) -> int:
        """Return the bytes that an upload to `path` may have; 0 for a path without uploads."""
        if path.endswith(FILE_PATHS):
            return self._file_bytes_max
        if path.endswith(AUDIO_PATHS):
            return self._audio_bytes_max
        return self._adapter_bytes_max if path.endswith(ADAPTER_PATH) else 0

    def take(self, tenant_id: TenantId, count: int) -> None:
        """Count bytes of a tenant's upload. Raises ApiError, and counts none then."""
        of_tenant = self._by_tenant.get(tenant_id, 0) + count
        if of_tenant > self._tenant_bytes_max:
            raise ApiError(
                ErrorCode.RATE_LIMITED,
                f"cannot take the upload now: this tenant's uploads that have not all arrived take"
                f" {self._tenant_bytes_max} bytes, which is the limit",
                retry_after_s=10.0,
            )
        if self._size_bytes + count > self._all_bytes_max:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot take the upload now: other uploads use all of the space for them",
                retry_after_s=10.0,
            )
        self._size_bytes += count
        self._by_tenant[tenant_id] = of_tenant

    def give_back(self, tenant_id: TenantId, count: int) -> None:
        """Count bytes of an upload no longer."""
        if not count:
            return
        self._size_bytes -= count
        self._by_tenant[tenant_id] -= count
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]


def _disk_failed(error: OSError) -> ApiError:
    return ApiError(
        ErrorCode.UNAVAILABLE,
        f"cannot keep the upload on disk: {error.strerror or error}",
        retry_after_s=10.0,
    )
