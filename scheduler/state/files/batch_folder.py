"""The contents of files of the public API: one file of a folder each, streamed and never whole.

Every scheduler of a cluster uses the same folder (a shared file system). A file appears under its
name only when it is complete and on disk.

A disk or a bucket may hang. So its calls run in threads of their own (`BatchFolder.run`), and leave
those that the rest of the scheduler needs. Tenants share these threads (`file_threads.py`).
"""

import asyncio
import copy
import heapq
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec, Self, TypeVar

from isochrone.service.failure_log import error_text
from isochrone.service.files import sync
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.decide.unnamed_contents import StoredContents
from scheduler.state.files.file_threads import FairTurns, FileThreads, no_answer

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 * 1024
FREE_BYTES_MIN: Final = 1 << 30
"""Uploads leave this much of the disk free: batches that run write their results there, and it may
be the database's disk. Each tenant has a limit of its own, but there may be any number of them."""

UNFINISHED: Final = ".part"
UNFINISHED_S: Final = 86_400.0

RETRY_AFTER_S: Final = 60.0

TRANSACTIONS_MAX: Final = 4
"""Transactions that wait for the disk at a time: each keeps a connection of the database, of which
there are twenty for everything that the scheduler does."""

TRANSACTION_CALL_TIMEOUT_S: Final = 3.0
"""Less than the 5 s after which Postgres ends a transaction that waits."""

CLIENT_CALL_TIMEOUT_S: Final = 30.0
"""How long one call may take while a client waits: half of what its router waits for an answer."""

RELEASES: Final[set[asyncio.Task[None]]] = set()
"""The tasks that close files. The event loop itself keeps none alive."""

P = ParamSpec("P")
T = TypeVar("T")


class BatchFolder:
    """Reads and writes files by id. Its methods block; those named `async` use a thread."""

    def __init__(self, folder: Path, free_bytes_min: int = FREE_BYTES_MIN) -> None:
        """`free_bytes_min` of the disk are not for uploads."""
        self._folder = folder
        self._free_bytes_min = free_bytes_min
        self._threads = FileThreads()
        self._transactions = FairTurns(TRANSACTIONS_MAX)
        self._tenant_id = ""

    def of_tenant(self, tenant_id: str) -> Self:
        """Return this folder with the calls counted as those of a tenant."""
        folder = copy.copy(self)
        folder._tenant_id = tenant_id
        return folder

    async def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return what `call` returns in a thread for files.

        Raises FileNotFoundError, and ApiError 503 if the disk fails, or if no thread is free in
        time.
        """
        try:
            return await self._threads.run(self._tenant_id, lambda: call(*arguments, **named))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                f"cannot use the folder of files now: {error.strerror or error}",
                retry_after_s=RETRY_AFTER_S,
            ) from error

    @asynccontextmanager
    async def transaction_turn(self) -> AsyncIterator[None]:
        """Wait until a transaction may wait for the disk; enter before it takes its connection.

        Raises ApiError 503.
        """
        try:
            await self._transactions.take(self._tenant_id)
        except TimeoutError:
            raise no_answer() from None
        try:
            yield
        finally:
            self._transactions.give_back(self._tenant_id)

    async def run_briefly(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Do what `run` does, for a transaction. Raises ApiError 503 if it takes too long."""
        async with _within(TRANSACTION_CALL_TIMEOUT_S):
            return await self.run(call, *arguments, **named)

    async def run_for_client(
        self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Do what `run` does, while a client waits. Raises ApiError 503 if it takes too long."""
        async with _within(CLIENT_CALL_TIMEOUT_S):
            return await self.run(call, *arguments, **named)

    def release(
        self, call: Callable[P, object], *arguments: P.args, **named: P.kwargs
    ) -> asyncio.Task[None]:
        """Start to close files in a thread by `call`; the task returned raises nothing.

        If a call on a file hangs, closing it hangs, too. So a caller that is cancelled meanwhile
        neither closes it on the event loop nor waits for it. The task waits for a thread without
        limit: a file that it dropped would be closed on the event loop.
        """

        def call_once() -> None:
            call(*arguments, **named)

        async def close() -> None:
            try:
                await self._threads.run(self._tenant_id, call_once, is_patient=True)
            except (ApiError, OSError) as error:
                reason = error_text(error)
                log.warning("cannot close a file", extra={"fields": {"reason": reason}})

        task = asyncio.create_task(close())
        RELEASES.add(task)
        task.add_done_callback(RELEASES.discard)
        return task

    def prepare(self) -> None:
        """Create the folder."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)

    def delete_unfinished(self) -> None:
        """Delete unfinished files of processes that were killed. Blocks.

        Others may be writing: their files are younger.
        """
        for path in self._folder.glob(f"*{UNFINISHED}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > UNFINISHED_S:
                    path.unlink()

    def list_contents(self, after: str, count: int) -> list[StoredContents]:
        """Return the first `count` files, by name, whose names come after `after`. Blocks."""
        with os.scandir(self._folder) as entries:
            names = (
                entry.name
                for entry in entries
                if entry.name > after and entry.is_file(follow_symlinks=False)
            )
            first = heapq.nsmallest(count, names)
        return [StoredContents(name, self._modified_at(name)) for name in first]

    def _modified_at(self, file_id: str) -> float:
        """Return when a file was modified last; infinity if it is gone by now."""
        try:
            return self._path(file_id).stat(follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return math.inf

    def has_room(self) -> bool:
        """Return whether the disk has space for uploads. Blocks."""
        return shutil.disk_usage(self._folder).free > self._free_bytes_min

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a new file; at the end it is complete, and after an exception it is gone."""
        # Two schedulers may write the results of the same batch: one of them no longer acts.
        part = self._folder / f"{file_id}.{secrets.token_hex(4)}{UNFINISHED}"
        try:
            with part.open("xb") as output:
                yield output
                output.flush()
                os.fsync(output.fileno())
            part.rename(self._path(file_id))
            sync(self._folder)
        finally:
            part.unlink(missing_ok=True)

    def open(self, file_id: str) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        return self._path(file_id).open("rb")

    @contextmanager
    def local(self, file_id: str) -> Iterator[BinaryIO]:
        """Open a file that is read whole, more than once. Raises FileNotFoundError."""
        with self.open(file_id) as source:
            yield source

    async def read_parts(self, file_id: str, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of a file, each given by its offset and its length."""
        return await self.run(self._read_parts, file_id, parts)

    def _read_parts(self, file_id: str, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.open(file_id) as source:
            return [os.pread(source.fileno(), length, offset) for offset, length in parts]

    async def delete(self, file_id: str) -> None:
        """Delete a file, if it is there. Raises ApiError 503 if that fails or takes too long."""
        await self.run_briefly(self._delete, file_id)

    def _delete(self, file_id: str) -> None:
        self._path(file_id).unlink(missing_ok=True)

    async def discard(self, file_id: str) -> None:
        """Delete a file that nothing names, after a failure; log if that fails too."""
        try:
            await self.delete(file_id)
        except (ApiError, OSError) as error:
            fields = {"file": file_id, "reason": str(error)}
            log.warning("cannot delete a file that nothing names", extra={"fields": fields})

    def _path(self, file_id: str) -> Path:
        return self._folder / file_id


@asynccontextmanager
async def _within(timeout_s: float) -> AsyncIterator[None]:
    """Raise ApiError 503 if the body takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise no_answer() from None
