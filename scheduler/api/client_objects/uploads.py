"""Writes an uploaded file to the batch folder while it arrives: it is never whole in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import BinaryIO, Final

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder

CHUNK_TIMEOUT_S: Final = 60.0
"""The longest pause between two chunks of an upload."""

ReadChunk = Callable[[int], Awaitable[bytes]]
"""Returns at most this many of the next bytes, and b"" at the end."""


async def write_upload(
    folder: BatchFolder,
    file_id: str,
    read_chunk: ReadChunk,
    *,
    bytes_max: int,
    on_chunk: Callable[[bytes], None] = lambda _: None,
) -> int:
    """Write a file and return its size; `on_chunk` sees each part of it.

    Raises ApiError for a file above `bytes_max` or one that does not go on. Then no file is left.
    """
    size_bytes = 0
    writing = folder.writing(file_id)
    output: BinaryIO = await asyncio.to_thread(writing.__enter__)
    try:
        while chunk := await _next_chunk(read_chunk):
            size_bytes += len(chunk)
            if size_bytes > bytes_max:
                raise ApiError(
                    ErrorCode.TOO_LARGE,
                    f"cannot store the file: it has more than {bytes_max} bytes",
                )
            on_chunk(chunk)
            await asyncio.to_thread(output.write, chunk)
    except BaseException as error:
        writing.__exit__(type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(writing.__exit__, None, None, None)
    return size_bytes


async def _next_chunk(read_chunk: ReadChunk) -> bytes:
    try:
        async with asyncio.timeout(CHUNK_TIMEOUT_S):
            return await read_chunk(CHUNK_BYTES)
    except TimeoutError:
        raise ApiError(
            ErrorCode.REQUEST_TIMEOUT,
            f"cannot read the file: nothing arrived for {CHUNK_TIMEOUT_S:g} s",
        ) from None
