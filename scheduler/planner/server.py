"""Answers requests to the planner, each from one consistent snapshot of the fleet."""

from typing import Final

import msgspec

from isochrone import __version__
from scheduler.decide.cluster import ClusterState
from scheduler.decide.demand import with_forecast
from scheduler.decide.membership import LivenessLimits, NodeContact
from scheduler.decide.placement import PlanLimits, PrefetchDecision, plan_fleet, plan_prefetch
from scheduler.decide.whatif import ClusterSnapshot, explain_placement
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
from scheduler.store.fleet.node_reports import NodeReportCache
from scheduler.store.pool import Pool, transaction

QUICK: Final = PlanLimits(thorough_effort=0)


class PlannerServer:
    """Answers requests. Keeps decoded node reports and the forecast between requests."""

    def __init__(self, pool: Pool, limits: LivenessLimits) -> None:
        self.forecast = DemandForecaster(pool)
        self._pool = pool
        self._limits = limits
        self._reports = NodeReportCache()

    async def answer(self, request: PlannerRequest) -> object:
        """Return the answer to a request, of the type that its class names."""
        match request:
            case PlanRequest(contact, is_quick):
                limits = QUICK if is_quick else PlanLimits()
                return plan_fleet(await self.cluster_state(contact), self._limits, limits)
            case PrefetchRequest(contact):
                return await self._prefetch(contact)
            case ExplainRequest(contact, deployment_id):
                return explain_placement(
                    await self.cluster_state(contact), deployment_id, self._limits
                )
            case SnapshotRequest(contact):
                snapshot = ClusterSnapshot(
                    cluster=await self.cluster_state(contact),
                    liveness=self._limits,
                    release=__version__,
                )
                return msgspec.json.encode(snapshot)
            case LearnRequest(epoch):
                return await self.forecast.learn(epoch)

    async def cluster_state(self, contact: NodeContact) -> ClusterState:
        """Return the state to plan from: the fleet, with demand raised to the forecast."""
        cluster = with_forecast(await self._read(contact), self.forecast.soon)
        return msgspec.structs.replace(cluster, is_forecast_known=self.forecast.is_known)

    async def _prefetch(self, contact: NodeContact) -> PrefetchDecision:
        cluster = await self.cluster_state(contact)
        later = self.forecast.later
        if not later.rows and not cluster.prefetches:
            return PrefetchDecision()
        return plan_prefetch(with_forecast(cluster, later.rows), later.in_s(), self._limits)

    async def _read(self, contact: NodeContact) -> ClusterState:
        async with transaction(self._pool, isolation="repeatable_read") as connection:
            return await read_cluster(connection, contact, self._reports)
