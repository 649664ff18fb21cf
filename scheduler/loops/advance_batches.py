"""Advances each open batch by one step: reads its input, ends it, writes its files.

Every step is one transaction, repeated after a failure. An interrupted step leaves neither items
nor files behind. Items are answered by routers meanwhile (`api/client_objects/batch_service.py`).

A large file takes a minute. So the steps that read or write files run beside each other and beside
the turns of this job: a turn starts some, and counts those that have ended since the last one.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import BinaryIO, Final, NamedTuple

from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_lines import RUN_PREFIX, error_line, result_line
from scheduler.decide.batch_steps import DueStep, next_steps
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.files.batch_input import BatchInput, has_more_lines
from scheduler.state.lease_state import LeaseState
from scheduler.store.client_objects.batch_files import add_file, delete_expired_files
from scheduler.store.client_objects.batch_items import (
    AnsweredItem,
    add_items,
    analyze_items,
    count_failed,
    delete_items,
    each_item,
    fail_repeated_ids,
    leased_items,
)
from scheduler.store.client_objects.batches import (
    StoredBatch,
    begin_finalizing,
    end_batch,
    fail_batch,
    open_batches,
    start_batch,
)
from scheduler.store.deployments import deployment_names
from scheduler.store.pool import Pool, transaction, using

log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 1024 * 1024
ANALYZED_MIN: Final = 1_000
"""With fewer items a statement is fast also if the database does not know of them."""

DELETED_MAX: Final = 5_000
FILES_DELETED_MAX: Final = 100
RUN_RESULTS_S: Final = 7 * 86_400
UNANSWERED: Final = {
    "expired": ("batch_expired", "the batch expired before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}
"""The error of an item without an answer, by the end of its batch."""


class BatchCounts(NamedTuple):
    """Counts of one turn's work."""

    begun: int
    ended: int
    items_deleted: int
    files_deleted: int


class BatchChanged(Exception):
    """The batch was cancelled or ended meanwhile: the step is undone."""


class ResultFile:
    """A file of results that is being written, with a buffer."""

    def __init__(self, output: BinaryIO) -> None:
        self.size_bytes = 0
        self._output = output
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0

    async def write(self, line: bytes) -> None:
        """Write a line, when enough of them are buffered."""
        self._buffer.append(line)
        self._buffered_bytes += len(line)
        if self._buffered_bytes >= BUFFER_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is buffered."""
        text, self._buffer = b"".join(self._buffer), []
        self.size_bytes += len(text)
        self._buffered_bytes = 0
        await asyncio.to_thread(self._output.write, text)


class Step(NamedTuple):
    """A step that runs: it returns how many batches began, and how many ended."""

    tenant_id: str
    task: asyncio.Task[tuple[int, int]]


class AdvanceBatches:
    """The periodic job of the acting scheduler."""

    def __init__(
        self,
        *,
        pool: Pool,
        lease: LeaseState,
        folder: BatchFolder,
        limits: BatchLimits,
        nudge: Callable[[], None],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`nudge` asks for another turn: a step has ended, and another may start."""
        self._pool = pool
        self._lease = lease
        self._folder = folder
        self._limits = limits
        self._nudge = nudge
        self._unix_clock = unix_clock
        self._steps: dict[str, Step] = {}

    async def run_once(self) -> BatchCounts:
        """Start steps of open batches, then delete what is no longer needed.

        Raises the error of a step that failed since the last turn.
        """
        begun, ended, errors = self._ended_steps()
        if not self._lease.is_acting:
            await self.close()
            return BatchCounts(begun, ended, 0, 0)
        async with using(self._pool) as connection:
            batches = await open_batches(connection)
        due = {
            batch.batch_id: batch
            for batch in batches
            if batch.batch_id not in self._steps and await self._is_due(batch)
        }
        steps = [DueStep(batch.batch_id, batch.tenant_id) for batch in due.values()]
        for step in next_steps(steps, [running.tenant_id for running in self._steps.values()]):
            task = asyncio.create_task(self._step(due[step.batch_id]))
            task.add_done_callback(self._on_step_end)
            self._steps[step.batch_id] = Step(step.tenant_id, task)
        counts = BatchCounts(begun, ended, await self._delete_items(), await self._delete_files())
        if errors:
            raise errors[0]
        return counts

    async def close(self) -> None:
        """Interrupt the steps that run."""
        tasks = [step.task for step in self._steps.values()]
        self._steps.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_step_end(self, task: asyncio.Task[tuple[int, int]]) -> None:
        # A step that failed is repeated when the next turn is due, not at once.
        if not task.cancelled() and task.exception() is None:
            self._nudge()

    def _ended_steps(self) -> tuple[int, int, list[BaseException]]:
        """Forget the steps that have ended; return their counts and errors."""
        begun = ended = 0
        errors: list[BaseException] = []
        for batch_id, (_, task) in list(self._steps.items()):
            if not task.done():
                continue
            del self._steps[batch_id]
            error = None if task.cancelled() else task.exception()
            if error is not None:
                errors.append(error)
            elif not task.cancelled():
                counts = task.result()
                begun, ended = begun + counts[0], ended + counts[1]
        return begun, ended, errors

    async def _is_due(self, batch: StoredBatch) -> bool:
        """Return whether a file of a batch is to be read or written."""
        return batch.status in ("validating", "finalizing") or await self._must_end(batch)

    async def _step(self, batch: StoredBatch) -> tuple[int, int]:
        try:
            if batch.status == "validating":
                return int(await self._read_input(batch)), 0
            await self._end(batch)
        except BatchChanged:
            log.info("batch changed meanwhile", extra={"fields": {"batch": batch.batch_id}})
            return 0, 0
        return 0, 1

    async def _read_input(self, batch: StoredBatch) -> bool:
        """Store the items of a new batch; fail the batch if its input cannot be used."""
        try:
            # Counted before anything is stored: the database never sees what is refused.
            if await asyncio.to_thread(self._has_too_many_lines, batch.input_file_id):
                message = f"the input file has more than {self._limits.items_max} lines"
                await self._fail(batch, "too_many_lines", message)
                return False
            source = await asyncio.to_thread(self._folder.open, batch.input_file_id)
        except FileNotFoundError:
            await self._fail(batch, "file_not_found", "the input file was deleted")
            return False
        with source:
            async with using(self._pool) as connection:
                known = await deployment_names(connection)
            lines = BatchInput(source, batch.endpoint, known)
            try:
                async with transaction(self._pool, by_index=True) as connection:
                    while items := await lines.next_items():
                        await add_items(connection, batch.batch_id, items)
                    await fail_repeated_ids(connection, batch.batch_id)
                    failed = await count_failed(connection, batch.batch_id)
                    if not lines.lines:
                        raise _NoLines
                    if lines.lines >= ANALYZED_MIN:
                        await analyze_items(connection)
                    if not await start_batch(
                        connection,
                        batch.batch_id,
                        deployment=lines.deployment,
                        total=lines.lines,
                        failed=failed,
                    ):
                        raise BatchChanged
            except _NoLines:
                await self._fail(batch, "empty_file", "the input file has no lines")
                return False
        return True

    def _has_too_many_lines(self, file_id: str) -> bool:
        with self._folder.open(file_id) as source:
            return has_more_lines(source, self._limits.items_max)

    async def _fail(self, batch: StoredBatch, code: str, message: str) -> None:
        async with transaction(self._pool) as connection:
            error = {"code": code, "message": message, "line": None, "param": None}
            await fail_batch(connection, batch.batch_id, [error])

    async def _must_end(self, batch: StoredBatch) -> bool:
        """Begin the end of a batch whose time has come."""
        is_over = batch.unanswered == 0 or batch.expires_at <= self._unix_clock()
        async with transaction(self._pool, by_index=True) as connection:
            if batch.status == "cancelling":
                # Leased items may still be finished: routers return them, or let go of them.
                is_over = await leased_items(connection, batch.batch_id) == 0
            return is_over and await begin_finalizing(connection, batch.batch_id)

    async def _end(self, batch: StoredBatch) -> None:
        """Write the files of a batch, and end it."""
        status = "cancelled" if batch.cancelling_at else "completed"
        written: list[str] = []
        try:
            if status == "completed" and batch.unanswered:
                status = "expired"
            results = await self._write_results(batch, status, written)
            async with transaction(self._pool) as connection:
                file_ids: list[str | None] = []
                names = (f"{batch.batch_id}_output.jsonl", f"{batch.batch_id}_error.jsonl")
                for file_id, name, result in zip(written, names, results, strict=True):
                    if not result.size_bytes:
                        file_ids.append(None)
                        continue
                    await add_file(
                        connection,
                        file_id=file_id,
                        tenant_id=batch.tenant_id,
                        purpose="batch_output",
                        filename=name,
                        size_bytes=result.size_bytes,
                        # Clients that queued runs of Workers AI know nothing of files.
                        expires_after_s=RUN_RESULTS_S
                        if batch.endpoint.startswith(RUN_PREFIX)
                        else None,
                    )
                    file_ids.append(file_id)
                if not await end_batch(
                    connection,
                    batch.batch_id,
                    status=status,
                    output_file_id=file_ids[0],
                    error_file_id=file_ids[1],
                ):
                    raise BatchChanged
        except BaseException:
            for file_id in written:
                await self._folder.discard(file_id)
            raise
        for file_id, result in zip(written, results, strict=True):
            if not result.size_bytes:
                await self._folder.discard(file_id)

    async def _write_results(
        self, batch: StoredBatch, status: str, written: list[str]
    ) -> list[ResultFile]:
        """Write the output file and the error file; append their ids to `written`.

        Answers of a batch that is finalizing do not change. The files are complete after the
        transaction: an upload to a bucket may take longer than a transaction may wait.
        """
        results: list[ResultFile] = []
        files = ExitStack()
        try:
            async with transaction(self._pool) as connection:
                for _ in range(2):
                    file_id = f"file-{secrets.token_hex(12)}"
                    written.append(file_id)
                    output = files.enter_context(self._folder.writing(file_id))
                    results.append(ResultFile(output))
                async for item in each_item(connection, batch.batch_id):
                    await results[item.is_error].write(_line_of(batch, item, status))
                for result in results:
                    await result.flush()
        except BaseException:
            files.__exit__(*sys.exc_info())
            raise
        await asyncio.to_thread(files.close)
        return results

    async def _delete_items(self) -> int:
        async with transaction(self._pool, by_index=True) as connection:
            return await delete_items(connection, DELETED_MAX)

    async def _delete_files(self) -> int:
        """Delete expired files, each with its row: one whose contents stay is tried again."""
        deleted = 0
        while deleted < FILES_DELETED_MAX:
            async with transaction(self._pool) as connection:
                file_ids = await delete_expired_files(connection, 1)
                for file_id in file_ids:
                    await self._folder.delete(file_id)
            if not file_ids:
                break
            deleted += 1
        return deleted


class _NoLines(Exception):
    """An input file has no lines."""


def _line_of(batch: StoredBatch, item: AnsweredItem, status: str) -> bytes:
    """Return the line of an item in the output or error file."""
    item_id = f"batch_req_{batch.batch_id.removeprefix('batch_')}_{item.line}"
    if item.is_done and not item.error_code:
        return result_line(
            item_id=item_id,
            custom_id=item.custom_id,
            status_code=item.status_code,
            request_id=item.request_id,
            body=item.result,
        )
    code, message = item.error_code, item.result.decode(errors="replace")
    if not item.is_done:
        code, message = UNANSWERED.get(status, UNANSWERED["expired"])
    return error_line(item_id=item_id, custom_id=item.custom_id, code=code, message=message)
