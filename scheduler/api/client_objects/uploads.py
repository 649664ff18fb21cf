"""Writes an uploaded file to the batch folder while it arrives: it is never whole in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, BinaryIO, Final, ParamSpec, TypeVar

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.batches import store_timeout_s
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder
from scheduler.state.files.file_threads import no_answer
from scheduler.store.client_objects.batch_files import has_file
from scheduler.store.pool import IDLE_TIMEOUT_S, UNAVAILABLE, Connection, Pool, using

CHUNK_TIMEOUT_S: Final = 60.0
"""The longest pause between two chunks of an upload."""

SPACE_CHECK_BYTES: Final = 16 * 1024 * 1024
"""The space on disk is looked at again after so many bytes."""

DECIDING_PAUSE_S: Final = IDLE_TIMEOUT_S + 1.0
DECIDING_ATTEMPTS_MAX: Final = 1_000
"""How often, and with which pause, a database that did not answer is asked for a file's row."""

_UNDOING: Final[set[asyncio.Task[None]]] = set()
"""The tasks that delete files later. The event loop itself keeps none alive."""

P = ParamSpec("P")
T = TypeVar("T")

HasRow = Callable[[Connection, str], Awaitable[bool]]

ReadChunk = Callable[[int], Awaitable[bytes]]
"""Returns at most this many of the next bytes, and b"" at the end."""


async def write_upload(
    folder: BatchFolder,
    file_id: str,
    read_chunk: ReadChunk,
    *,
    bytes_max: int,
    on_chunk: Callable[[bytes], None] = lambda _: None,
    timeout_s_of: Callable[[int], float] = store_timeout_s,
) -> int:
    """Write a file and return its size; `on_chunk` sees each part of it.

    Raises ApiError for a file above `bytes_max`, for one that does not go on, if the disk has no
    room, and if the disk or bucket takes longer than `timeout_s_of` the file's size to complete it.
    Then no file is left.
    """
    size_bytes, checked_at = 0, 0
    await _require_room(folder)
    writing = folder.writing(file_id)
    output: BinaryIO = await _on_disk(folder, writing.__enter__)
    try:
        while chunk := await _next_chunk(read_chunk):
            size_bytes += len(chunk)
            if size_bytes > bytes_max:
                raise ApiError(
                    ErrorCode.TOO_LARGE,
                    f"cannot store the file: it has more than {bytes_max} bytes",
                )
            on_chunk(chunk)
            if size_bytes - checked_at > SPACE_CHECK_BYTES:
                await _require_room(folder)
                checked_at = size_bytes
            await _on_disk(folder, output.write, chunk)
    except BaseException as error:
        undone = folder.release(writing.__exit__, type(error), error, error.__traceback__)
        if not isinstance(error, asyncio.CancelledError):
            await asyncio.wait([undone])
        raise
    completing = asyncio.create_task(_on_disk(folder, writing.__exit__, None, None, None))
    await _complete_or_discard(folder, file_id, completing, timeout_s_of(size_bytes))
    return size_bytes


async def _complete_or_discard(
    folder: BatchFolder, file_id: str, completing: asyncio.Task[bool | None], timeout_s: float
) -> None:
    """Wait until a file is complete. Raises ApiError 503 if that takes too long.

    A thread does not end because its caller does. So the file is deleted after `completing`, which
    is not waited for if it hangs.
    """
    try:
        await asyncio.wait([completing], timeout=timeout_s)
        if not completing.done():
            raise no_answer()
        completing.result()
    except BaseException as error:
        undoing = _undo_later(_discard_after(folder, file_id, completing))
        if completing.done() or isinstance(error, asyncio.CancelledError):
            await asyncio.wait([undoing])
        raise


async def _discard_after(
    folder: BatchFolder, file_id: str, completing: asyncio.Task[bool | None]
) -> None:
    await asyncio.gather(completing, return_exceptions=True)
    await folder.discard(file_id)


def _undo_later(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    _UNDOING.add(task)
    task.add_done_callback(_UNDOING.discard)
    return task


async def end_before_cancelling(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If this is cancelled, `work` ends first.

    A thread, or a commit, does not end because its caller does. Whoever undoes it must come after.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # Its own error has no reader any more.
        await asyncio.gather(task, return_exceptions=True)
        raise


async def add_or_discard(
    pool: Pool,
    folder: BatchFolder,
    file_id: str,
    adding: Coroutine[Any, Any, T],
    has_row: HasRow = has_file,
) -> T:
    """Return the result of `adding`, which stores that a file exists; else delete the file.

    A commit whose answer is lost, or whose client has left, may have succeeded: then `has_row`
    finds the row, and the file stays. While the database cannot say, it may still commit: the file
    stays until it can.
    """
    try:
        return await end_before_cancelling(adding)
    except BaseException as error:
        is_refused = isinstance(error, ApiError)
        is_added = False if is_refused else await _is_added(pool, file_id, has_row)
        if is_added is None:
            _undo_later(_discard_unless_added(pool, folder, file_id, has_row))
        elif not is_added:
            await folder.discard(file_id)
        raise


async def _is_added(pool: Pool, file_id: str, has_row: HasRow) -> bool | None:
    """Return whether the database has a file's row; None if it does not answer."""
    try:
        async with using(pool) as connection:
            return await has_row(connection, file_id)
    except UNAVAILABLE:
        return None


async def _discard_unless_added(
    pool: Pool, folder: BatchFolder, file_id: str, has_row: HasRow
) -> None:
    """Delete a file once the database has answered twice and does not have its row.

    A transaction from before the outage has ended at the second time.
    """
    answers = 0
    for _ in range(DECIDING_ATTEMPTS_MAX):
        await asyncio.sleep(DECIDING_PAUSE_S)
        is_added = await _is_added(pool, file_id, has_row)
        if is_added:
            return
        answers = 0 if is_added is None else answers + 1
        if answers == 2:
            await folder.discard(file_id)
            return


async def _require_room(folder: BatchFolder) -> None:
    if not await _on_disk(folder, folder.has_room):
        raise ApiError(
            ErrorCode.UNAVAILABLE,
            "cannot store the file now: the disk for files is almost full",
            retry_after_s=60.0,
        )


async def _on_disk(
    folder: BatchFolder, call: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """Return what `call` returns in a thread. Raises ApiError if the disk fails."""
    try:
        return await folder.run(call, *arguments, **named)
    except FileNotFoundError as error:
        raise ApiError(
            ErrorCode.UNAVAILABLE,
            f"cannot store the file now: the folder is gone ({error.strerror})",
            retry_after_s=60.0,
        ) from error


async def _next_chunk(read_chunk: ReadChunk) -> bytes:
    try:
        async with asyncio.timeout(CHUNK_TIMEOUT_S):
            return await read_chunk(CHUNK_BYTES)
    except TimeoutError:
        raise ApiError(
            ErrorCode.REQUEST_TIMEOUT,
            f"cannot read the file: nothing arrived for {CHUNK_TIMEOUT_S:g} s",
        ) from None
