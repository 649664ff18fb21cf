"""Sends a stored file as the body of a response: a part at a time, never whole in memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from aiohttp import web

from isochrone.fair_shares import FairShares
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder

log = logging.getLogger(__name__)

DOWNLOADS_MAX: Final = 128
"""Downloads at a time, through all routers. Each may have 8 MiB of a bucket's object in memory, and
a client may read as slowly as it likes: a tenant has at most as many as are free."""

BUSY_RETRY_AFTER_S: Final = 5.0


class DownloadLimit:
    """Counts the downloads of clients."""

    def __init__(self) -> None:
        self._shares = FairShares(DOWNLOADS_MAX)

    @contextmanager
    def counted(self, tenant_id: str) -> Iterator[None]:
        """Count a tenant's download while it lasts. Raises ApiError 429 if there are too many."""
        if not self._shares.take(tenant_id, 1):
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot send the file now: too many files are being sent",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self._shares.give_back(tenant_id, 1)


async def send_file(
    request: web.Request,
    folder: BatchFolder,
    file_id: str,
    response: web.StreamResponse,
    *,
    first: int,
    count: int,
) -> web.StreamResponse:
    """Send `count` bytes of a file from the byte `first`.

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
