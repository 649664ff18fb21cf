"""Sets the gauges of the metrics page."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from isochrone.wire.ids import DeploymentId
from router.admission_queue import AdmissionQueue
from router.fleet_state import FleetState
from router.loops.follow_routes import TableFollower
from router.recording.metrics import Metrics

REPLICAS_PER_SLICE: Final = 50
"""How many unhealthy replicas are counted before requests have their turn: a tenth of a
millisecond, or three if their deployments' routes have not been looked at since the table came. All
replicas of a router that is cut off are unhealthy."""


@dataclass(eq=False, kw_only=True)
class GaugeSetter:
    """Copies the router's current state into its gauges.

    `is_connected` says whether a scheduler, or the main process, is connected.
    """

    fleet: FleetState
    follower: TableFollower
    waiting: AdmissionQueue
    metrics: Metrics
    is_connected: Callable[[], bool]

    async def run_once(self) -> None:
        """Set every gauge."""
        metrics, fleet = self.metrics, self.fleet
        is_connected = self.is_connected()
        metrics.connected.set(is_connected)
        metrics.table_age.set(self.follower.age_s(is_connected=is_connected))
        totals = fleet.in_flight.totals()
        metrics.in_flight.labels("prefill").set(totals.prefill_tokens)
        metrics.in_flight.labels("decode").set(totals.decode_tokens)
        metrics.open_requests.set(totals.requests)
        metrics.waiting.set(self.waiting.depth)
        metrics.waiting_bytes.set(self.waiting.bytes)
        metrics.ejected.set(len(fleet.health.unhealthy()))
        metrics.panics.set(await self._count_panics())

    async def _count_panics(self) -> int:
        fleet, unhealthy = self.fleet, Counter[DeploymentId]()
        ejected = [*fleet.health.ejected_until_s(fleet.clock())]
        for start in range(0, len(ejected), REPLICAS_PER_SLICE):
            unhealthy.update(fleet.deployments_of(ejected[start : start + REPLICAS_PER_SLICE]))
            await asyncio.sleep(0)
        return fleet.panicking_deployments(unhealthy)
