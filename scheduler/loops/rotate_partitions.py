"""Creates the demand table's partitions for the coming days and drops those past retention."""

from dataclasses import dataclass

from isochrone.service.clock import JumpFreeClock
from scheduler.state.lease_state import LeaseState
from scheduler.store.accounts.usage import rotate_demand_partitions
from scheduler.store.pool import Pool, transaction


@dataclass(eq=False, kw_only=True)
class RotatePartitions:
    """Partitions exist two days ahead, so this job may fail for a day without harm."""

    pool: Pool
    lease: LeaseState
    clock: JumpFreeClock

    async def run_once(self) -> int:
        """Create and drop partitions; return how many."""
        if not self.lease.is_acting:
            return 0
        async with transaction(self.pool) as connection:
            # Do not queue for long behind a reader that holds the table; the next turn tries again.
            await connection.execute("SET LOCAL lock_timeout = '2s'")
            return await rotate_demand_partitions(connection, self.clock.now())
