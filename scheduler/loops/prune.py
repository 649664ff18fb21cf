"""Forgets what is past its keeping, in batches."""

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from isochrone.service.identity import CERTIFICATE_LIFETIME_S
from scheduler.acting import Acting
from scheduler.store.events import prune_events
from scheduler.store.identities import prune_revocations
from scheduler.store.pool import Connection, transaction
from scheduler.store.usage import prune

BATCH: Final = 5_000
BATCHES_MAX: Final = 40


class Pruned(NamedTuple):
    """One turn's count of rows."""

    rows: int


class Prune:
    """Each batch is a transaction of its own: no table is locked for long."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> Pruned:
        """Delete batches of each kind until one is not full; what is left waits for the next."""
        config = self._acting.config
        # A certificate of an earlier, longer setting may still live.
        lifetime_s = max(CERTIFICATE_LIFETIME_S, config.certificate_lifetime_s)
        rows = await self._forget(
            lambda c: prune_events(c, keep_days=config.event_retention_days, batch=BATCH)
        )
        rows += await self._forget(
            lambda c: prune_revocations(c, lifetime_s=lifetime_s, batch=BATCH)
        )
        rows += await self._forget(lambda c: prune(c, batch=BATCH))
        return Pruned(rows)

    async def _forget(self, one_batch: Callable[[Connection], Awaitable[int]]) -> int:
        rows = 0
        for _ in range(BATCHES_MAX):
            if not self._acting.is_acting:
                break
            async with transaction(self._acting.pool) as connection:
                forgotten = await one_batch(connection)
            rows += forgotten
            if forgotten < BATCH:
                break
        return rows
