"""Writes an uploaded file to the batch folder while it arrives: it is never whole in memory."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, BinaryIO, Final, TypeVar

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.relay import store_timeout_s
from scheduler.state.files.batch_folder import (
    CHUNK_BYTES,
    CLIENT_CALL_TIMEOUT_S,
    BatchFolder,
)
from scheduler.state.files.file_threads import no_answer
from scheduler.store.client_objects.batch_files import has_file
from scheduler.store.pool import IDLE_TIMEOUT_S, UNAVAILABLE, Connection, Pool, using

log = logging.getLogger(__name__)

CHUNK_TIMEOUT_S: Final = 60.0
"""The longest pause between two chunks of an upload."""

UNDO_TIMEOUT_S: Final = 5.0
"""How long an upload that failed waits until its file is gone."""

SPACE_CHECK_BYTES: Final = 16 * 1024 * 1024
"""The space on disk is looked at again after so many bytes."""

DECIDING_PAUSE_S: Final = IDLE_TIMEOUT_S + 1.0
DECIDING_ATTEMPTS_MAX: Final = 1_000
"""How often, and with which pause, a file's row is read from a database that did not answer."""

_UNDOING: Final[set[asyncio.Task[None]]] = set()
"""The tasks that delete files later. The event loop itself keeps none alive."""

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

    Raises ApiError, and leaves no file, if the file is larger than `bytes_max`, if the client stops
    sending, if the disk has no space, or if the disk or bucket is too slow. `timeout_s_of` the
    file's size limits the time to write what arrives, and again the time to complete the file.
    CLIENT_CALL_TIMEOUT_S limits each call while the file arrives.
    """
    size_bytes, checked_at = 0, 0
    file = _ArrivingFile(folder, file_id, timeout_s_of)
    try:
        await file.require_room(0)
        await file.open()
        while chunk := await _next_chunk(read_chunk):
            size_bytes += len(chunk)
            if size_bytes > bytes_max:
                raise ApiError(
                    ErrorCode.TOO_LARGE,
                    f"cannot store the file: it has more than {bytes_max} bytes",
                )
            on_chunk(chunk)
            if size_bytes - checked_at > SPACE_CHECK_BYTES:
                await file.require_room(size_bytes)
                checked_at = size_bytes
            await file.write(size_bytes, chunk)
    except BaseException as error:
        undoing = _undo_later(file.undo(error))
        if not file.is_hanging and not isinstance(error, asyncio.CancelledError):
            await asyncio.wait([undoing], timeout=UNDO_TIMEOUT_S)
        raise
    completing = asyncio.create_task(_on_disk(folder, file.complete))
    await _complete_or_discard(folder, file_id, completing, timeout_s_of(size_bytes))
    return size_bytes


class _ArrivingFile:
    """A file while it arrives: its calls to the disk come one after the other.

    A thread does not end because its caller does. So a call that hangs keeps its thread, and the
    file is closed after it: closing it would hang in a second thread.
    """

    def __init__(
        self, folder: BatchFolder, file_id: str, timeout_s_of: Callable[[int], float]
    ) -> None:
        self._folder = folder
        self._file_id = file_id
        self._writing = folder.writing(file_id)
        self._output: BinaryIO | None = None
        self._timeout_s_of = timeout_s_of
        self._spent_s = 0.0
        self._call: asyncio.Task[Any] | None = None

    @property
    def is_hanging(self) -> bool:
        """Whether the last call has not ended."""
        return self._call is not None and not self._call.done()

    async def open(self) -> None:
        """Open the file. Raises ApiError, as `write` does."""
        await self._run(0, self._enter)

    async def write(self, size_bytes: int, chunk: bytes) -> None:
        """Write a part. Raises ApiError if the disk fails or hangs.

        All calls together may take as long as a file of `size_bytes`, which have arrived.
        """
        assert self._output is not None
        await self._run(size_bytes, partial(self._output.write, chunk))

    async def require_room(self, size_bytes: int) -> None:
        """Raise ApiError if the disk is almost full, or as `write` does."""
        if not await self._run(size_bytes, self._folder.has_room):
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot store the file now: the disk for files is almost full",
                retry_after_s=60.0,
            )

    def complete(self) -> None:
        """Make the file appear under its name. Blocks."""
        self._writing.__exit__(None, None, None)

    async def undo(self, error: BaseException) -> None:
        """Close and delete the file, whose writing ended with an error, after the last call."""
        if self._call is not None:
            await asyncio.gather(self._call, return_exceptions=True)
        if self._output is not None:
            leave = self._writing.__exit__
            await self._folder.release(leave, type(error), error, error.__traceback__)

    def _enter(self) -> None:
        self._output = self._writing.__enter__()

    async def _run(self, size_bytes: int, call: Callable[[], T]) -> T:
        clock = asyncio.get_running_loop().time
        began_at_s = clock()
        self._call = calling = asyncio.create_task(_on_disk(self._folder, call))
        left_s = max(0.0, self._timeout_s_of(size_bytes) - self._spent_s)
        timeout_s = min(left_s, CLIENT_CALL_TIMEOUT_S)
        await asyncio.wait([calling], timeout=timeout_s)
        self._spent_s += clock() - began_at_s
        if not calling.done():
            raise _hanging(self._file_id, timeout_s)
        return calling.result()


async def _complete_or_discard(
    folder: BatchFolder, file_id: str, completing: asyncio.Task[None], timeout_s: float
) -> None:
    """Wait until a file is complete. Raises ApiError 503 if that takes too long.

    A thread does not end because its caller does. So the file is deleted after `completing`, which
    is not waited for if it hangs.
    """
    try:
        await asyncio.wait([completing], timeout=timeout_s)
        if not completing.done():
            raise _hanging(file_id, timeout_s)
        completing.result()
    except BaseException as error:
        undoing = _undo_later(_discard_after(folder, file_id, completing))
        if completing.done() or isinstance(error, asyncio.CancelledError):
            await asyncio.wait([undoing])
        raise


async def _discard_after(folder: BatchFolder, file_id: str, completing: asyncio.Task[None]) -> None:
    await asyncio.gather(completing, return_exceptions=True)
    await folder.discard(file_id)


def _undo_later(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    _UNDOING.add(task)
    task.add_done_callback(_UNDOING.discard)
    return task


async def end_before_cancelling(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If this is cancelled, `work` ends first.

    A thread or a commit goes on when its caller is cancelled. It can be undone only after its end.
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


def _hanging(file_id: str, waited_s: float) -> ApiError:
    """Log that a call for an upload hangs; return the error for the client."""
    fields = {"file": file_id, "waited_s": round(waited_s, 1)}
    log.error(
        "cannot store an upload: its disk or bucket hangs, and so does a thread until it answers",
        extra={"fields": fields},
    )
    return no_answer()


async def _on_disk(folder: BatchFolder, call: Callable[[], T]) -> T:
    """Return what `call` returns in a thread. Raises ApiError if the disk fails."""
    try:
        return await folder.run(call)
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
