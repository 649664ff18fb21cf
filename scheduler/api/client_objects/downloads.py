"""Sends a stored file as the body of a response: a part at a time, never whole in memory.

Rule 1: a client may read as slowly as it likes, until all downloads are taken and one of another
tenant finds no place. Then the slowest is ended, if it is slower than RATE_MIN_BYTES_PER_S.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final, NoReturn

from aiohttp import web

from isochrone.fair_shares import FairShares
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder

log = logging.getLogger(__name__)

DOWNLOADS_MAX: Final = 128
"""Downloads at a time, through all routers. Each may have 8 MiB of a bucket's object in memory. A
tenant has at most as many as are free, so eight tenants may have all."""

RATE_MIN_BYTES_PER_S: Final = 128 * 1024
MEASURED_S: Final = 10.0
"""A download is measured for so long before it may have to give way."""

BUSY_RETRY_AFTER_S: Final = 5.0


class Download:
    """A running download: how much was sent, and since when that is measured."""

    __slots__ = ("_end", "_measured_bytes", "_measured_since_s", "sent_bytes", "tenant_id")

    def __init__(self, tenant_id: str, end: Callable[[], object], now_s: float) -> None:
        self.tenant_id = tenant_id
        self._end = end
        self.sent_bytes = self._measured_bytes = 0
        self._measured_since_s = now_s

    def slow_rate(self, now_s: float) -> float | None:
        """Return the bytes per second if they are too few; else measure from now on."""
        measured_s = now_s - self._measured_since_s
        if measured_s < MEASURED_S:
            return None
        rate = (self.sent_bytes - self._measured_bytes) / measured_s
        if rate < RATE_MIN_BYTES_PER_S:
            return rate
        self._measured_bytes, self._measured_since_s = self.sent_bytes, now_s
        return None

    def end(self) -> None:
        """Close its connection."""
        log.warning(
            "ending a slow download: others wait", extra={"fields": {"tenant": self.tenant_id}}
        )
        self._end()


class DownloadLimit:
    """Counts the downloads of clients."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._shares = FairShares(DOWNLOADS_MAX)
        self._running: dict[Download, None] = {}

    @contextmanager
    def counted(self, tenant_id: str, end: Callable[[], object]) -> Iterator[Download]:
        """Count a tenant's download while it lasts; `end` closes its connection.

        Raises ApiError 429 if there are too many.
        """
        self._make_room(tenant_id)
        if not self._shares.take(tenant_id, 1):
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot send the file now: too many files are being sent",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )
        download = Download(tenant_id, end, self._clock())
        self._running[download] = None
        try:
            yield download
        finally:
            self._release(download)

    def _make_room(self, tenant_id: str) -> None:
        """End as many slow downloads as one more of a tenant needs, if there are so many."""
        lacking = self._shares.lacking(tenant_id, 1)
        if lacking <= 0:
            return
        now_s = self._clock()
        slow = [
            (rate, number, download)
            for number, download in enumerate(self._running)
            if download.tenant_id != tenant_id and (rate := download.slow_rate(now_s)) is not None
        ]
        if len(slow) < lacking:
            return
        for _, _, download in sorted(slow)[:lacking]:
            self._release(download)
            download.end()

    def _release(self, download: Download) -> None:
        if download in self._running:
            del self._running[download]
            self._shares.give_back(download.tenant_id, 1)


def connection_end(request: web.Request) -> Callable[[], object]:
    """Return the function that closes a request's connection."""
    transport = request.transport
    return transport.abort if transport is not None else lambda: None


async def send_file(
    request: web.Request,
    folder: BatchFolder,
    file_id: str,
    response: web.StreamResponse,
    *,
    first: int,
    count: int,
    download: Download | None = None,
) -> web.StreamResponse:
    """Send `count` bytes of a file from the byte `first`; count them as those of a `download`.

    Raises FileNotFoundError, or ApiError, if nothing was sent yet. After that a failure, or a file
    that is shorter, closes the connection: the body has its length, so the reader notices.
    """
    source = await folder.run_for_client(folder.open, file_id)
    try:
        await folder.run_for_client(source.seek, first)
        chunk = await folder.run_for_client(source.read, min(CHUNK_BYTES, count))
        response.content_length = left = count
        await response.prepare(request)
        try:
            while chunk:
                await response.write(chunk)
                left -= len(chunk)
                if download is not None:
                    download.sent_bytes += len(chunk)
                chunk = await folder.run_for_client(source.read, min(CHUNK_BYTES, left))
        except (ApiError, FileNotFoundError) as error:
            give_up(request, file_id, str(error))
        if left:
            give_up(request, file_id, f"the file ends {left} bytes before its size")
    finally:
        folder.release(source.close)
    await response.write_eof()
    return response


def give_up(request: web.Request, file_id: str, reason: str) -> NoReturn:
    """Close the connection: an error in the middle of a body would be read as a part of it."""
    log.error("cannot send a file", extra={"fields": {"file": file_id, "reason": reason}})
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError(reason)
