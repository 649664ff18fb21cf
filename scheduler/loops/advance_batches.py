"""Advances each open batch by one step: reads its input, ends it, writes its files.

Every step is one transaction, repeated after a failure. An interrupted step leaves no items behind,
and no files but those that its repetition replaces. Items are answered by routers meanwhile
(`api/client_objects/batch_service.py`).

A large file takes a minute. So the steps that read or write files run beside each other and beside
the turns of this job: a turn starts some, and counts those that have ended since the last one.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from isochrone.service.failure_log import error_text
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_lines import RUN_PREFIX
from scheduler.decide.batch_steps import DueStep, next_steps
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.files.batch_input import BatchInput, has_more_lines
from scheduler.state.files.batch_results import end_status, write_results
from scheduler.state.lease_state import LeaseState
from scheduler.store.client_objects.batch_files import add_file, delete_expired_file, read_file
from scheduler.store.client_objects.batch_items import (
    add_items,
    analyze_items,
    count_failed,
    delete_items,
    fail_repeated_ids,
    leased_items,
)
from scheduler.store.client_objects.batches import (
    StoredBatch,
    begin_finalizing,
    due_batches,
    end_batch,
    fail_batch,
    full_tenants,
    start_batch,
)
from scheduler.store.deployments import deployment_names
from scheduler.store.pool import Pool, transaction, using

log = logging.getLogger(__name__)

ANALYZED_MIN: Final = 1_000
"""With fewer items a statement is fast also if the database does not know of them."""

DELETED_MAX: Final = 5_000
FILES_DELETED_MAX: Final = 100
RUN_RESULTS_S: Final = 7 * 86_400
UNFINISHED_INTERVAL_S: Final = 3_600.0
RETRY_MIN_S: Final = 2.0
RETRY_MAX_S: Final = 60.0
"""A step that failed is repeated after a time that doubles with each failure, between these two."""

FORGET_FAILED_S: Final = 600.0
"""How long after it was due a step that failed may wait for its turn. Later it is another's
scheduler's, or its batch has ended."""

DUE_OF_TENANT_MAX: Final = 64
"""The batches of a tenant that one turn looks at."""


class BatchCounts(NamedTuple):
    """Counts of one turn's work."""

    begun: int
    ended: int
    items_deleted: int
    files_deleted: int


class BatchChanged(Exception):
    """The batch was cancelled or ended meanwhile: the step is undone."""


class FailedStep(NamedTuple):
    """How often the step of a batch failed, and when (Unix time) it is repeated."""

    failures: int
    repeat_at: float


class Step(NamedTuple):
    """A step that runs: it returns how many batches began, and how many ended."""

    tenant_id: str
    task: asyncio.Task[tuple[int, int]]


@dataclass(eq=False, kw_only=True)
class AdvanceBatches:
    """The periodic job of the acting scheduler.

    `nudge` asks for another turn: a step has ended, and another may start.
    """

    pool: Pool
    lease: LeaseState
    folder: BatchFolder
    limits: BatchLimits
    nudge: Callable[[], None]
    unix_clock: Callable[[], float] = time.time
    _steps: dict[str, Step] = field(default_factory=dict, init=False)
    _failed: dict[str, FailedStep] = field(default_factory=dict, init=False)
    _unfinished_due_at: float = field(default=0.0, init=False)
    _expired_after: str = field(default="", init=False)
    """The id of the expired file that could not be deleted, in the last turn."""

    async def run_once(self) -> BatchCounts:
        """Start steps of open batches, then delete what is no longer needed.

        Raises the error of a step that failed since the last turn.
        """
        begun, ended, errors = self._ended_steps()
        if not self.lease.is_acting:
            await self.close()
            return BatchCounts(begun, ended, 0, 0)
        due = await self._due()
        steps = [DueStep(batch.batch_id, batch.tenant_id) for batch in due.values()]
        for step in next_steps(steps, [running.tenant_id for running in self._steps.values()]):
            task = asyncio.create_task(self._step(due[step.batch_id]))
            task.add_done_callback(self._on_step_end)
            self._steps[step.batch_id] = Step(step.tenant_id, task)
        async with transaction(self.pool, by_index=True) as connection:
            deleted = await delete_items(connection, DELETED_MAX)
        counts = BatchCounts(begun, ended, deleted, await self._delete_files())
        if self.unix_clock() >= self._unfinished_due_at:
            self._unfinished_due_at = self.unix_clock() + UNFINISHED_INTERVAL_S
            # Not waited for: the disk may hang.
            self.folder.release(self.folder.delete_unfinished)
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
            self.nudge()

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
                self._repeat_later(batch_id, error)
            elif not task.cancelled():
                self._failed.pop(batch_id, None)
                counts = task.result()
                begun, ended = begun + counts[0], ended + counts[1]
        return begun, ended, errors

    def _repeat_later(self, batch_id: str, error: BaseException) -> None:
        """Let others begin before a step that failed: it may fail for ever."""
        earlier = self._failed.get(batch_id)
        failures = earlier.failures + 1 if earlier is not None else 1
        wait_s = min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(failures - 1, 10))
        self._failed[batch_id] = FailedStep(failures, self.unix_clock() + wait_s)
        fields = {"batch": batch_id, "reason": error_text(error)}
        log.warning(
            "cannot read or write the files of a batch: this is repeated", extra={"fields": fields}
        )

    async def _due(self) -> dict[str, StoredBatch]:
        """Return the batches of which a file is to be read or written, in the order of creation."""
        now = self.unix_clock()
        self._failed = {
            batch_id: failed
            for batch_id, failed in self._failed.items()
            if failed.repeat_at + FORGET_FAILED_S > now
        }
        waiting = [batch_id for batch_id, failed in self._failed.items() if failed.repeat_at > now]
        async with using(self.pool) as connection:
            # Batches that are not read yet wait: their items would be too many for the database.
            full = await full_tenants(connection, self.limits.tenant_items_max)
            batches = await due_batches(
                connection,
                now=now,
                full=full,
                excluded=[*self._steps, *waiting],
                of_tenant_max=DUE_OF_TENANT_MAX,
            )
        due: dict[str, StoredBatch] = {}
        for batch, is_expired in batches:
            if batch.status == "validating" and is_expired:
                await self._fail(batch, "batch_expired", "its input could not be read in time")
            elif batch.status in ("finalizing", "validating"):
                due[batch.batch_id] = batch
            else:
                finalizing = await self._begin_end(batch)
                if finalizing is not None:
                    due[batch.batch_id] = finalizing
        return due

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
        async with using(self.pool) as connection:
            file = await read_file(connection, batch.tenant_id, batch.input_file_id)
            known = await deployment_names(connection)
        if file is None:
            await self._fail(batch, "file_not_found", "the input file was deleted")
            return False
        # A file that has a row but no contents is one of a folder that is not mounted: repeated.
        folder = self.folder.of_tenant(batch.tenant_id)
        opening = folder.local(batch.input_file_id)
        source = await folder.run(opening.__enter__)
        try:
            # Counted before anything is stored: a refused line never reaches the database.
            if await folder.run(has_more_lines, source, self.limits.items_max):
                message = f"the input file has more than {self.limits.items_max} lines"
                await self._fail(batch, "too_many_lines", message)
                return False
            await folder.run(source.seek, 0)
            lines = BatchInput(source, batch.endpoint, known)
            return await self._add_items(batch, lines, file.size_bytes)
        finally:
            folder.release(opening.__exit__, None, None, None)

    async def _add_items(self, batch: StoredBatch, lines: BatchInput, size_bytes: int) -> bool:
        """Store the items of an input file of `size_bytes`, all or none."""
        try:
            async with transaction(self.pool, by_index=True) as connection:
                folder = self.folder.of_tenant(batch.tenant_id)
                while items := await folder.run(lines.next_items):
                    await add_items(connection, batch.batch_id, items)
                if lines.bytes_read != size_bytes:
                    reason = f"it ends after {lines.bytes_read} of {size_bytes} bytes"
                    raise OSError(f"cannot read the file {batch.input_file_id}: {reason}")
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

    async def _fail(self, batch: StoredBatch, code: str, message: str) -> None:
        async with transaction(self.pool) as connection:
            error = {"code": code, "message": message, "line": None, "param": None}
            await fail_batch(connection, batch.batch_id, [error])

    async def _begin_end(self, batch: StoredBatch) -> StoredBatch | None:
        """Begin the end of a batch whose time has come; return it as it is then."""
        async with transaction(self.pool, by_index=True) as connection:
            # Leased items may still be finished: routers return them, or let go of them.
            if batch.status == "cancelling" and await leased_items(connection, batch.batch_id):
                return None
            return await begin_finalizing(connection, batch.batch_id)

    async def _end(self, batch: StoredBatch) -> None:
        """Write the files of a batch, and end it.

        Files that hold answers are never deleted here, whatever fails: the batch may have ended
        although the answer to the commit is lost, or by another scheduler, which wrote the same.
        """
        folder = self.folder.of_tenant(batch.tenant_id)
        results = await write_results(self.pool, folder, batch)
        # Clients that queued runs of Workers AI know nothing of files.
        expires_after_s = RUN_RESULTS_S if batch.endpoint.startswith(RUN_PREFIX) else None
        file_ids: list[str | None] = [file.file_id if file.size_bytes else None for file in results]
        async with transaction(self.pool) as connection:
            for file in results:
                if file.size_bytes:
                    await add_file(
                        connection,
                        file_id=file.file_id,
                        tenant_id=batch.tenant_id,
                        purpose="batch_output",
                        filename=file.name,
                        size_bytes=file.size_bytes,
                        expires_after_s=expires_after_s,
                    )
            if not await end_batch(
                connection,
                batch.batch_id,
                status=end_status(batch),
                output_file_id=file_ids[0],
                error_file_id=file_ids[1],
            ):
                raise BatchChanged
        for file in results:
            if not file.size_bytes:
                await self.folder.discard(file.file_id)

    async def _delete_files(self) -> int:
        """Delete expired files, each with its row: one whose contents stay is tried again.

        A failure ends the turn. The next turn begins after that file, which delays no other.
        """
        for deleted in range(FILES_DELETED_MAX):
            after, self._expired_after = self._expired_after, ""
            async with transaction(self.pool) as connection:
                file_id = await delete_expired_file(connection, after)
                if file_id is None:
                    return deleted
                self._expired_after = file_id
                await self.folder.delete(file_id)
        return FILES_DELETED_MAX


class _NoLines(Exception):
    """An input file has no lines."""
