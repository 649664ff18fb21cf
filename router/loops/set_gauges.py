"""Gauges: how things stand, for whoever reads the metrics."""

from collections.abc import Callable

from router.admission_queue import AdmissionQueue
from router.fleet_state import FleetState
from router.loops.follow_routes import TableFollower
from router.metrics import Metrics


class GaugeSetter:
    """Says how this router stands."""

    def __init__(
        self,
        *,
        fleet: FleetState,
        follower: TableFollower,
        waiting: AdmissionQueue,
        metrics: Metrics,
        is_led: Callable[[], bool],
    ) -> None:
        """`is_led` says whether somebody is there to send tables."""
        self._fleet = fleet
        self._follower = follower
        self._waiting = waiting
        self._metrics = metrics
        self._is_led = is_led

    async def run_once(self) -> None:
        """Set every gauge."""
        metrics, fleet = self._metrics, self._fleet
        is_led = self._is_led()
        metrics.connected.set(is_led)
        metrics.table_age.set(self._follower.age_s(is_led=is_led))
        totals = fleet.in_flight.totals()
        metrics.in_flight.labels("prefill").set(totals.prefill_tokens)
        metrics.in_flight.labels("decode").set(totals.decode_tokens)
        metrics.open_requests.set(totals.requests)
        metrics.waiting.set(self._waiting.depth)
        metrics.waiting_bytes.set(self._waiting.bytes)
        metrics.ejected.set(len(fleet.health.ejected()))
        metrics.panics.set(fleet.panicking_deployments())
