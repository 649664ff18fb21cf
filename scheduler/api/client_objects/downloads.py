"""Sends a stored file as the body of a response: a part at a time, never whole in memory."""

import logging
from typing import NoReturn

from aiohttp import web

from isochrone.wire.errors import ApiError
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder

log = logging.getLogger(__name__)


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
    source = await folder.run(folder.open, file_id)
    with source:
        await folder.run(source.seek, first)
        chunk = await folder.run(source.read, min(CHUNK_BYTES, count))
        response.content_length = left = count
        await response.prepare(request)
        try:
            while chunk:
                await response.write(chunk)
                left -= len(chunk)
                chunk = await folder.run(source.read, min(CHUNK_BYTES, left))
        except (ApiError, FileNotFoundError) as error:
            give_up(request, file_id, str(error))
        if left:
            give_up(request, file_id, f"the file ends {left} bytes before its size")
    await response.write_eof()
    return response


def give_up(request: web.Request, file_id: str, reason: str) -> NoReturn:
    """Close the connection: an error in the middle of a body would be read as a part of it."""
    log.error("cannot send a file", extra={"fields": {"file": file_id, "reason": reason}})
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError(reason)
