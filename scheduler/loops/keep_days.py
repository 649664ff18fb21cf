"""Keeps demand's partitions: days to come are there, days past their keeping are gone."""

from typing import NamedTuple

from scheduler.acting import Acting, now
from scheduler.store.pool import transaction
from scheduler.store.usage import keep_demand_days


class Kept(NamedTuple):
    """One turn's count of partitions made or dropped."""

    changes: int = 0


class KeepDays:
    """Two days are made ahead, so a day of this duty failing costs nothing."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> Kept:
        """Make and drop."""
        if not self._acting.is_acting:
            return Kept()
        async with transaction(self._acting.pool) as connection:
            # A reader that holds the table for long is waited for a moment only; next turn tries.
            await connection.execute("SET LOCAL lock_timeout = '2s'")
            return Kept(await keep_demand_days(connection, now()))
