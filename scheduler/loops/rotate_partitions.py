"""Keeps demand's partitions: days to come are there, days past their keeping are gone."""

from typing import NamedTuple

from scheduler.acting import Acting, now
from scheduler.store.pool import transaction
from scheduler.store.usage import rotate_demand_partitions


class PartitionCounts(NamedTuple):
    """One turn's count of partitions made or dropped."""

    changes: int = 0


class RotatePartitions:
    """Two days are made ahead, so a day of this duty failing costs nothing."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> PartitionCounts:
        """Make and drop."""
        if not self._acting.is_acting:
            return PartitionCounts()
        async with transaction(self._acting.pool) as connection:
            # A reader that holds the table for long is waited for a moment only; next turn tries.
            await connection.execute("SET LOCAL lock_timeout = '2s'")
            return PartitionCounts(await rotate_demand_partitions(connection, now()))
