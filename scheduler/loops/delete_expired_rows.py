"""Forgets what is past its keeping, in batches."""

from typing import Final, NamedTuple

from scheduler.acting import Acting, now
from scheduler.store.pool import transaction
from scheduler.store.retention import RetentionRule, delete_expired, retention_rules

BATCH: Final = 5_000
BATCHES_MAX: Final = 40


class ExpiredRowCounts(NamedTuple):
    """One turn's count of rows."""

    rows: int


class DeleteExpiredRows:
    """Each batch is a transaction of its own: no table is locked for long."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> ExpiredRowCounts:
        """Delete batches of each kind until one is not full; what is left waits for the next."""
        config = self._acting.config
        everything = retention_rules(
            event_days=config.event_retention_days,
            certificate_lifetime_s=config.certificate_lifetime_s,
        )
        return ExpiredRowCounts(sum([await self._forget(what) for what in everything]))

    async def _forget(self, what: RetentionRule) -> int:
        rows = 0
        for _ in range(BATCHES_MAX):
            if not self._acting.is_acting:
                break
            async with transaction(self._acting.pool) as connection:
                forgotten = await delete_expired(connection, what, now(), BATCH)
            rows += forgotten
            if forgotten < BATCH:
                break
        return rows
