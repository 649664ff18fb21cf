"""Creates the demand table's partitions for the coming days and drops those past retention."""

from isochrone.service.clock import JumpFreeClock
from scheduler.state.lease_state import LeaseState
from scheduler.store.accounts.usage import rotate_demand_partitions
from scheduler.store.pool import Pool, transaction


class RotatePartitions:
    """Partitions exist two days ahead, so this job may fail for a day without harm."""

    def __init__(self, *, pool: Pool, lease: LeaseState, clock: JumpFreeClock) -> None:
        self._pool = pool
        self._clock = clock
        self._lease = lease

    async def run_once(self) -> int:
        """Create and drop partitions; return how many."""
        if not self._lease.is_acting:
            return 0
        async with transaction(self._pool) as connection:
            # Do not queue for long behind a reader that holds the table; the next turn tries again.
            await connection.execute("SET LOCAL lock_timeout = '2s'")
            return await rotate_demand_partitions(connection, self._clock.now())
