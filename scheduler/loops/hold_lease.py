"""Holds the lease, or waits for it. The only duty that decides whether this process acts."""

from typing import Final, NamedTuple

from scheduler.acting import Acting
from scheduler.store.lease import (
    acquire_or_renew_lease,
    count_peers,
    read_cluster_row,
    read_lease_remaining_s,
)
from scheduler.store.pool import using

LATE_S: Final = 1.0


class LeaseOutcome(NamedTuple):
    """One turn's outcome."""

    acting: bool
    epoch: int


class HoldLease:
    """Renew, take over, or step down."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> LeaseOutcome:
        """Ask the database; an error leaves the trust that is left to run out by itself."""
        acting = self._acting
        asked_at = acting.turned_at = acting.clock()
        async with using(acting.reserved) as connection:
            lease = await acquire_or_renew_lease(
                connection, acting.holder, acting.config.lease_ttl_s
            )
            if lease is not None:
                cluster = await read_cluster_row(connection)
                acting.fleet_size = await count_peers(connection)
            else:
                left_s = await read_lease_remaining_s(connection)
        if lease is None:
            await acting.step_down()
            # A holder that lives renews long before; one that has missed it may be gone.
            is_late = left_s < acting.config.lease_ttl_s - acting.config.lease_renew_s - LATE_S
            acting.next_acting_at = asked_at + left_s if is_late else float("-inf")
            return LeaseOutcome(False, 0)
        if cluster.cluster_id != acting.cluster_id:
            raise RuntimeError(
                f"cannot act: the database is of cluster {cluster.cluster_id}, this process "
                f"started with {acting.cluster_id}; restart it if that is meant"
            )
        if acting.renewed(lease, asked_at):
            # Each node is told what to run after its next report; nothing here may take long.
            acting.publish()
            acting.nudge_place()
        return LeaseOutcome(True, lease.epoch)
