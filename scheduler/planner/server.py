"""Answers what the planner is asked: each answer from one consistent picture of the fleet."""

import msgspec

from isochrone import __version__
from scheduler.decide.cluster import ClusterState
from scheduler.decide.demand.demand_rates import with_forecast
from scheduler.decide.membership.liveness import LivenessLimits, NodeContact
from scheduler.decide.placement.prefetch import PrefetchDecision, plan_prefetch
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.whatif.explain import explain_placement
from scheduler.decide.whatif.what_if import ClusterSnapshot
from scheduler.planner.demand_forecaster import DemandForecaster
from scheduler.planner.messages import (
    ExplainRequest,
    LearnRequest,
    PlannerRequest,
    PlanRequest,
    PrefetchRequest,
    SnapshotRequest,
)
from scheduler.store.cluster import read_cluster
from scheduler.store.node_reports import NodeReportCache
from scheduler.store.pool import Pool, transaction


class PlannerServer:
    """What is kept from one question to the next: nodes as they reported, and the forecast."""

    def __init__(self, pool: Pool, limits: LivenessLimits) -> None:
        self.forecast = DemandForecaster(pool)
        self._pool = pool
        self._limits = limits
        self._reports = NodeReportCache()

    async def answer(self, asked: PlannerRequest) -> object:
        """Return what the question says that it is answered with."""
        match asked.question:
            case PlanRequest(heard):
                return plan_fleet(await self.picture(heard), self._limits)
            case PrefetchRequest(heard):
                return await self._foresee(heard)
            case ExplainRequest(heard, deployment_id):
                return explain_placement(await self.picture(heard), deployment_id, self._limits)
            case SnapshotRequest(heard):
                picture = ClusterSnapshot(
                    cluster=await self.picture(heard), liveness=self._limits, release=__version__
                )
                return msgspec.json.encode(picture)
            case LearnRequest(epoch):
                return await self.forecast.learn(epoch)

    async def picture(self, heard: NodeContact) -> ClusterState:
        """Return what is decided from: the fleet, and demand raised to what is foretold."""
        return with_forecast(await self._read(heard), self.forecast.soon)

    async def _foresee(self, heard: NodeContact) -> PrefetchDecision:
        cluster = await self.picture(heard)
        later = self.forecast.later
        if not later.rows and not cluster.prefetches:
            return PrefetchDecision()
        return plan_prefetch(with_forecast(cluster, later.rows), later.in_s(), self._limits)

    async def _read(self, heard: NodeContact) -> ClusterState:
        async with transaction(self._pool, isolation="repeatable_read") as connection:
            return await read_cluster(connection, heard, self._reports)
