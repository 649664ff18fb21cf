"""Deletes contents of clients' files that no row names, left by schedulers that died."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from isochrone.wire.ids import ClusterId
from scheduler.decide.unnamed_contents import (
    MARK,
    ListingRefused,
    StoredContents,
    is_old,
    old_contents,
    own_mark,
    unnamed_contents,
)
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.files.batch_results import result_file_ids
from scheduler.state.lease_state import LeaseState
from scheduler.store.client_objects.adapters import adapter_files_among
from scheduler.store.client_objects.batch_files import files_among
from scheduler.store.client_objects.batches import open_batch_ids
from scheduler.store.history_clock import read_history_clock
from scheduler.store.pool import Pool, transaction, using

log = logging.getLogger(__name__)

LISTED_MAX: Final = 10_000
DELETED_MAX: Final = 100
"""Files deleted in one turn. The next turn goes on after the last name."""

CHECKED_MAX: Final = 1_000
"""Names in one statement."""

MARKS_MAX: Final = 100

LIST_TIMEOUT_S: Final = 300.0
"""A disk or bucket that hangs longer fails the turn."""


class SweptCounts(NamedTuple):
    """How many contents one turn has listed, and how many it has deleted."""

    listed: int = 0
    deleted: int = 0


@dataclass(eq=False, kw_only=True)
class SweepContents:
    """Walks over the folder in the order of names, a part in each turn."""

    pool: Pool
    lease: LeaseState
    folder: BatchFolder
    cluster_id: ClusterId
    _after: str = field(default="", init=False)
    """The last name of the turn before, empty at the start of the folder."""
    _is_refused: bool = field(default=False, init=False)
    """Whether the bucket refused the last list."""

    async def run_once(self) -> SweptCounts:
        """List some contents, and delete those that are old and that no row names.

        Raises MarkedByOthers, MostlyUnnamed, and ApiError if the disk or bucket fails.
        """
        if not self.lease.is_acting:
            return SweptCounts()
        try:
            counts = await self._sweep()
        except ListingRefused as refused:
            # An operator may want it so: everything else works without.
            if not self._is_refused:
                log.warning(
                    "cannot look for files that no row names: the bucket refuses lists of its"
                    " objects. Permit s3:ListBucket; until then such files stay",
                    extra={"fields": {"reason": str(refused)}},
                )
            self._is_refused = True
            return SweptCounts()
        self._is_refused = False
        return counts

    async def _sweep(self) -> SweptCounts:
        async with using(self.pool) as connection:
            # This machine's clock is not used: one that is ahead would make new files look old.
            now = (await read_history_clock(connection)).at_s
        if not await self._is_long_marked(now):
            return SweptCounts()
        listed = await self._list(self._after, LISTED_MAX)
        self._after = listed[-1].file_id if len(listed) == LISTED_MAX else ""
        old = old_contents(listed, now)
        unnamed = unnamed_contents(old, await self._named(old))
        if len(unnamed) > DELETED_MAX:
            del unnamed[DELETED_MAX:]
            self._after = unnamed[-1]
        return SweptCounts(len(listed), await self._delete(unnamed))

    async def _is_long_marked(self, now: float) -> bool:
        """Return whether other clusters have had the time to see this one's mark; leave it."""
        names = await self._list(MARK, MARKS_MAX)
        marks = [contents for contents in names if contents.file_id.startswith(MARK)]
        mark = own_mark(marks, self.cluster_id)
        if mark is None:
            await self.folder.run(self._leave_mark)
        return mark is not None and is_old(mark, now)

    def _leave_mark(self) -> None:
        with self.folder.writing(MARK + self.cluster_id) as output:
            output.write(b"the files here are those of the cluster in this name\n")

    async def _list(self, after: str, count: int) -> list[StoredContents]:
        async with asyncio.timeout(LIST_TIMEOUT_S):
            return await self.folder.run(self.folder.list_contents, after, count)

    async def _named(self, file_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that a row names, or that an open batch will name."""
        named: set[str] = set()
        for start in range(0, len(file_ids), CHECKED_MAX):
            page = file_ids[start : start + CHECKED_MAX]
            async with transaction(self.pool, isolation="repeatable_read") as connection:
                named |= await files_among(connection, page)
                named |= await adapter_files_among(connection, page)
                for batch_id in await open_batch_ids(connection):
                    named.update(result_file_ids(batch_id))
        return named

    async def _delete(self, file_ids: Sequence[str]) -> int:
        deleted = 0
        for file_id in file_ids:
            if not self.lease.is_acting:
                break
            await self.folder.delete(file_id)
            deleted += 1
            log.info("deleted contents that no row names", extra={"fields": {"file": file_id}})
        return deleted
