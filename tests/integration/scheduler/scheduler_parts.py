"""A scheduler's state and some of its jobs on one pool, without its listeners."""

from typing import Any

from isochrone.service.network.connection_count import ConnectionCount
from isochrone.wire.ids import ClusterId
from scheduler.database import Database
from scheduler.decide.membership import LivenessLimits
from scheduler.loops.advance_rollouts import AdvanceRollouts
from scheduler.loops.hold_lease import HoldLease
from scheduler.loops.publish_routes import PublishRoutes
from scheduler.loops.record_node_loss import RecordNodeLoss
from scheduler.state.scheduler_state import SchedulerState
from scheduler.store.fleet.node_reports import NodeReportCache
from scheduler.store.lease import read_cluster_row
from scheduler.store.pool import Pool, using


class FakeClock:
    """A monotonic clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def no_nudge() -> None:
    """Ignore a nudge: the tests run each job's turns themselves."""


class SchedulerParts:
    """One process's state, and jobs that use it."""

    def __init__(
        self,
        pool: Pool,
        cluster_id: ClusterId,
        *,
        name: str = "s1",
        lease_ttl_s: float = 6.0,
        limits: LivenessLimits | None = None,
        clock: Any = None,
    ) -> None:
        self.database = Database(pool, pool, pool, pool, cluster_id)
        self.clock = FakeClock()
        self.limits = limits or LivenessLimits()
        self.state = SchedulerState(
            # Each is a process of its own, also two of one name.
            holder=f"{name}/{id(self):x}",
            lease_ttl_s=lease_ttl_s,
            admissions_per_s=100.0,
            lost_after_s=self.limits.lost_after_s,
            hear_first_s=10.0,
            unregistered=ConnectionCount(20, 20),
            intake=pool,
            cluster_id=cluster_id,
            clock=clock or self.clock,
            nudge_publish=no_nudge,
        )
        self.reports = NodeReportCache()

    @property
    def hold_lease(self) -> HoldLease:
        return HoldLease(
            reserved=self.database.reserved,
            cluster_id=self.database.cluster_id,
            renew_s=2.0,
            lease=self.state.lease,
            leadership=self.state.leadership,
            admission=self.state.admission,
            routes=self.state.routes,
            assignments=self.state.assignments,
            nudge_place=no_nudge,
        )

    def publish_routes(self) -> PublishRoutes:
        return PublishRoutes(
            pool=self.database.pool,
            interval_s=2.0,
            limits=self.limits,
            lease=self.state.lease,
            peers=self.state.peers,
            heartbeats=self.state.heartbeats,
            routes=self.state.routes,
            reports=self.reports,
            first_reports=self.state.first_reports,
        )

    def record_node_loss(self) -> RecordNodeLoss:
        return RecordNodeLoss(
            pool=self.database.pool,
            lease=self.state.lease,
            heartbeats=self.state.heartbeats,
            reports=self.reports,
            limits=self.limits,
        )

    def advance_rollouts(self) -> AdvanceRollouts:
        return AdvanceRollouts(
            pool=self.database.pool,
            lease=self.state.lease,
            routes=self.state.routes,
            nudge_place=no_nudge,
        )


async def scheduler_parts(pool: Pool, name: str = "s1", **fields: Any) -> SchedulerParts:
    """Return the parts of a scheduler of the cluster that the database holds; it is a standby."""
    async with using(pool) as connection:
        cluster = await read_cluster_row(connection)
    return SchedulerParts(pool, cluster.cluster_id, name=name, **fields)


async def expire_lease(pool: Pool) -> None:
    """Let the lease run out, so that any scheduler may take it."""
    async with using(pool) as connection:
        await connection.execute("UPDATE lease SET expires_at = '-infinity'")
