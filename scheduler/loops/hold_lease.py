"""Takes, renews or gives up the lease. Only this job decides whether the process acts."""

from collections.abc import Callable
from typing import Final, NamedTuple

from isochrone.wire.ids import ClusterId
from scheduler.state.leadership import Leadership
from scheduler.state.lease_state import LeaseState
from scheduler.state.peer_admission import PeerAdmission
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.lease import (
    acquire_or_renew_lease,
    count_peers,
    read_cluster_row,
    read_lease_remaining_s,
)
from scheduler.store.pool import Pool, using

LATE_S: Final = 1.0
"""A holder that renews this much later than it should may be gone."""


class LeaseOutcome(NamedTuple):
    """Whether the process acts after a turn, and under which epoch."""

    acting: bool
    epoch: int


class HoldLease:
    """Leader election, over reserved connections."""

    def __init__(
        self,
        *,
        reserved: Pool,
        cluster_id: ClusterId,
        renew_s: float,
        lease: LeaseState,
        leadership: Leadership,
        admission: PeerAdmission,
        routes: PublishedRoutes,
        nudge_place: Callable[[], None],
    ) -> None:
        self._reserved = reserved
        self._cluster_id = cluster_id
        self._renew_s = renew_s
        self._lease = lease
        self._leadership = leadership
        self._admission = admission
        self._routes = routes
        self._nudge_place = nudge_place

    async def run_once(self) -> LeaseOutcome:
        """Ask the database for the lease. After an error the remaining trust runs out by itself."""
        state = self._lease
        requested_at = state.last_attempt_at = state.clock()
        async with using(self._reserved) as connection:
            lease = await acquire_or_renew_lease(connection, state.holder, state.ttl_s)
            if lease is not None:
                cluster = await read_cluster_row(connection)
                self._admission.fleet_size = await count_peers(connection)
            else:
                remaining_s = await read_lease_remaining_s(connection)
        if lease is None:
            await self._leadership.step_down()
            is_late = remaining_s < state.ttl_s - self._renew_s - LATE_S
            state.free_at = requested_at + remaining_s if is_late else float("-inf")
            return LeaseOutcome(False, 0)
        if cluster.cluster_id != self._cluster_id:
            raise RuntimeError(
                f"cannot act: the database belongs to cluster {cluster.cluster_id}, this process "
                f"started with {self._cluster_id}; restart it if the database was replaced"
            )
        if self._leadership.take(lease, requested_at):
            # Assignments follow each node's next report; nothing here may take long.
            self._routes.mark_changed()
            self._nudge_place()
        return LeaseOutcome(True, lease.epoch)
