"""Has the planner learn each ten minutes of demand once they have ended, and forecast from them."""

from collections.abc import Callable
from typing import NamedTuple

from scheduler.planner.client import PlannerClient
from scheduler.state.lease_state import LeaseState


class DemandCounts(NamedTuple):
    """Counts of one turn: time slots learned, series known, series saved."""

    slots: int = 0
    series: int = 0
    saved: int = 0


class LearnDemand:
    """The forecast itself lives in the planner's process (`planner/forecast.py`)."""

    def __init__(
        self,
        *,
        planner: PlannerClient,
        lease: LeaseState,
        nudge_place: Callable[[], None],
        nudge_prefetch: Callable[[], None],
    ) -> None:
        self._planner = planner
        self._lease = lease
        self._nudge_place = nudge_place
        self._nudge_prefetch = nudge_prefetch

    async def run_once(self) -> DemandCounts:
        """Learn until no ended slot is left; nudge the jobs that use a new forecast."""
        counts = DemandCounts()
        is_behind = True
        while is_behind and self._lease.is_acting:
            learned = await self._planner.learn(self._lease.epoch)
            counts = DemandCounts(counts.slots + learned.slots, learned.series, learned.saved)
            is_behind = learned.is_behind
            if learned.is_new:
                self._nudge_place()
                self._nudge_prefetch()
        return counts
