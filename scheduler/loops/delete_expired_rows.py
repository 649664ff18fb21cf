"""Deletes rows past their retention, in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from isochrone.service.clock import JumpFreeClock
from scheduler.state.lease_state import LeaseState
from scheduler.store.pool import Pool, transaction
from scheduler.store.retention import RetentionRule, delete_expired

BATCH_ROWS: Final = 5_000
BATCHES_MAX: Final = 40


@dataclass(eq=False, kw_only=True)
class DeleteExpiredRows:
    """Each batch is its own transaction, so no table is locked for long."""

    pool: Pool
    lease: LeaseState
    rules: Sequence[RetentionRule]
    clock: JumpFreeClock

    async def run_once(self) -> int:
        """Apply each rule until a batch is not full, at most BATCHES_MAX times; return the rows."""
        return sum([await self._apply(rule) for rule in self.rules])

    async def _apply(self, rule: RetentionRule) -> int:
        rows = 0
        for _ in range(BATCHES_MAX):
            if not self.lease.is_acting:
                break
            async with transaction(self.pool) as connection:
                deleted = await delete_expired(connection, rule, self.clock.now(), BATCH_ROWS)
            rows += deleted
            if deleted < BATCH_ROWS:
                break
        return rows
