"""Takes, renews or gives up the lease. Only this job decides whether the process acts.

It also notices that the database has lost history under a running scheduler: a backup was restored,
or a standby promoted that lacked the last transactions. The fleet refuses generations that it has
seen already, and the store may lack replicas that run. So the counters are raised above what this
process has handed out, and a new term begins, in which every node reports again before routes are
published.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from isochrone.wire.ids import ClusterId, Epoch, Generation
from scheduler.state.leadership import Leadership
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.peer_admission import PeerAdmission
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.events import record_event
from scheduler.store.lease import (
    ClusterRow,
    Lease,
    acquire_or_renew_lease,
    count_peers,
    raise_epoch_and_generation,
    read_cluster_row,
    read_lease_remaining_s,
)
from scheduler.store.pool import Pool, transaction, using

log = logging.getLogger(__name__)

LATE_S: Final = 1.0
"""A holder that renews this much later than it should may be gone."""


class LeaseOutcome(NamedTuple):
    """Whether the process acts after a turn, and under which epoch."""

    acting: bool
    epoch: int


class _Counters(NamedTuple):
    """The newest counters that this process has read or handed out."""

    epoch: Epoch = Epoch(0)
    generation: Generation = Generation(0)
    route_generation: Generation = Generation(0)

    def highest(self, other: "_Counters") -> "_Counters":
        return _Counters(
            max(self.epoch, other.epoch),
            max(self.generation, other.generation),
            max(self.route_generation, other.route_generation),
        )


@dataclass(eq=False, kw_only=True)
class HoldLease:
    """Leader election, over reserved connections."""

    reserved: Pool
    cluster_id: ClusterId
    renew_s: float
    lease: LeaseState
    leadership: Leadership
    admission: PeerAdmission
    routes: PublishedRoutes
    assignments: AssignmentOutbox
    nudge_place: Callable[[], None]
    _newest: _Counters = field(default_factory=_Counters, init=False)

    async def run_once(self) -> LeaseOutcome:
        """Ask the database for the lease. After an error the remaining trust runs out by itself."""
        state = self.lease
        requested_at = state.last_attempt_at = state.clock()
        # Read before the store: a generation handed out meanwhile may be newer than the stored one.
        known = self._known_counters()
        async with using(self.reserved) as connection:
            cluster = await read_cluster_row(connection)
            # Checked first: the lease would be kept from the schedulers of that cluster.
            self._require_own(cluster)
            lease = await acquire_or_renew_lease(connection, state.holder, state.ttl_s)
            if lease is not None:
                self.admission.fleet_size = await count_peers(connection)
            else:
                remaining_s = await read_lease_remaining_s(connection)
        if lease is None:
            await self.leadership.step_down()
            is_late = remaining_s < state.ttl_s - self.renew_s - LATE_S
            state.free_at = requested_at + remaining_s if is_late else float("-inf")
            return LeaseOutcome(False, 0)
        stored = _Counters(lease.epoch, cluster.generation, cluster.route_generation)
        self._newest = known.highest(stored)
        if self._newest != stored:
            lease = await self._begin_after_loss(lease, stored)
        if self.leadership.take(lease, requested_at):
            # Assignments follow each node's next report; nothing here may take long.
            self.routes.mark_changed()
            self.nudge_place()
        return LeaseOutcome(True, lease.epoch)

    def _require_own(self, cluster: ClusterRow) -> None:
        """Raise RuntimeError if the database has become that of another cluster."""
        if cluster.cluster_id != self.cluster_id:
            raise RuntimeError(
                f"cannot act: the database belongs to cluster {cluster.cluster_id}, this process "
                f"started with {self.cluster_id}; restart it if the database was replaced"
            )

    def _known_counters(self) -> _Counters:
        """Return the counters that the store must not be behind."""
        newest, table = self._newest, self.routes.table
        return _Counters(
            max(newest.epoch, self.lease.newest_epoch),
            max(newest.generation, self.assignments.newest_generation),
            max(newest.route_generation, Generation(0) if table is None else table.generation),
        )

    async def _begin_after_loss(self, lease: Lease, stored: _Counters) -> Lease:
        """Raise the store's counters above the known ones; return the lease of a new term."""
        newest, state = self._newest, self.lease
        reason = (
            f"epoch {stored.epoch}, generations {stored.generation} and "
            f"{stored.route_generation} after {newest.epoch}, {newest.generation} and "
            f"{newest.route_generation}: was a backup restored?"
        )
        log.error("the database has lost history", extra={"fields": {"reason": reason}})
        async with transaction(self.reserved) as connection:
            await raise_epoch_and_generation(
                connection,
                holder=state.holder,
                generation=max(newest.generation, newest.route_generation),
                # Above the stored one in any case, so that it is raised.
                epoch=Epoch(newest.epoch + 1),
            )
            await record_event(
                connection,
                actor="scheduler",
                kind="database.lost_history",
                subject=self.cluster_id,
                reason=reason,
            )
            renewed = await acquire_or_renew_lease(connection, state.holder, state.ttl_s)
        return renewed or lease
