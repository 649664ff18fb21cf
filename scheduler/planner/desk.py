"""Answers what the planner is asked: each answer from one consistent picture of the fleet."""

import msgspec

from isochrone import __version__
from scheduler.decide.cluster import ClusterState
from scheduler.decide.demand import foreseeing
from scheduler.decide.explain import explain
from scheduler.decide.liveness import Heard, LivenessLimits
from scheduler.decide.prefetch import Foreseen, prefetch
from scheduler.decide.versions import decide
from scheduler.decide.what_if import Picture
from scheduler.planner.forecast import Forecast
from scheduler.planner.questions import Asked, Learn, WhatIs, WhatMoves, WhatToFetch, Why
from scheduler.store.cluster import read_cluster
from scheduler.store.node_reports import NodeReportCache
from scheduler.store.pool import Pool, transaction


class Desk:
    """What is kept from one question to the next: nodes as they reported, and the forecast."""

    def __init__(self, pool: Pool, limits: LivenessLimits) -> None:
        self.forecast = Forecast(pool)
        self._pool = pool
        self._limits = limits
        self._known_nodes = NodeReportCache()

    async def answer(self, asked: Asked) -> object:
        """Return what the question says that it is answered with."""
        match asked.question:
            case WhatMoves(heard):
                return decide(await self.picture(heard), self._limits)
            case WhatToFetch(heard):
                return await self._foresee(heard)
            case Why(heard, deployment_id):
                return explain(await self.picture(heard), deployment_id, self._limits)
            case WhatIs(heard):
                picture = Picture(
                    cluster=await self.picture(heard), liveness=self._limits, release=__version__
                )
                return msgspec.json.encode(picture)
            case Learn(epoch):
                return await self.forecast.learn(epoch)

    async def picture(self, heard: Heard) -> ClusterState:
        """Return what is decided from: the fleet, and demand raised to what is foretold."""
        return foreseeing(await self._read(heard), self.forecast.soon)

    async def _foresee(self, heard: Heard) -> Foreseen:
        cluster = await self.picture(heard)
        later = self.forecast.later
        if not later.rows and not cluster.prefetches:
            return Foreseen()
        return prefetch(foreseeing(cluster, later.rows), later.in_s(), self._limits)

    async def _read(self, heard: Heard) -> ClusterState:
        async with transaction(self._pool, isolation="repeatable_read") as connection:
            return await read_cluster(connection, heard, self._known_nodes)
