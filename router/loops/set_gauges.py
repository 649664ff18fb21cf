"""Sets the gauges of the metrics page."""

import asyncio
from collections import Counter
from collections.abc import Callable
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


class GaugeSetter:
    """Copies the router's current state into its gauges."""

    def __init__(
        self,
        *,
        fleet: FleetState,
        follower: TableFollower,
        waiting: AdmissionQueue,
        metrics: Metrics,
        is_connected: Callable[[], bool],
    ) -> None:
        """`is_connected` says whether a scheduler, or the main process, is connected."""
        self._fleet = fleet
        self._follower = follower
        self._waiting = waiting
        self._metrics = metrics
        self._is_connected = is_connected

    async def run_once(self) -> None:
        """Set every gauge."""
        metrics, fleet = self._metrics, self._fleet
        is_connected = self._is_connected()
        metrics.connected.set(is_connected)
        metrics.table_age.set(self._follower.age_s(is_connected=is_connected))
        totals = fleet.in_flight.totals()
        metrics.in_flight.labels("prefill").set(totals.prefill_tokens)
        metrics.in_flight.labels("decode").set(totals.decode_tokens)
        metrics.open_requests.set(totals.requests)
        metrics.waiting.set(self._waiting.depth)
        metrics.waiting_bytes.set(self._waiting.bytes)
        metrics.ejected.set(len(fleet.health.unhealthy()))
        metrics.panics.set(await self._count_panics())

    async def _count_panics(self) -> int:
        fleet, unhealthy = self._fleet, Counter[DeploymentId]()
        ejected = [*fleet.health.ejected_until_s(fleet.clock())]
        for start in range(0, len(ejected), REPLICAS_PER_SLICE):
            unhealthy.update(fleet.deployments_of(ejected[start : start + REPLICAS_PER_SLICE]))
            await asyncio.sleep(0)
        return fleet.panicking_deployments(unhealthy)
