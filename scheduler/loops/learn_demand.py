"""Has the planner learn each ten minutes of demand once they have ended, and forecast from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduler.planner.client import PlannerClient
from scheduler.state.lease_state import LeaseState

LEARN_SHARE: Final = 0.25
"""The share of the time in which the planner learns while it is behind. A plan waits less."""


class DemandCounts(NamedTuple):
    """Counts of one turn: time slots learned, series known, series saved."""

    slots: int = 0
    series: int = 0
    saved: int = 0


@dataclass(eq=False, kw_only=True)
class LearnDemand:
    """The forecast itself lives in the planner's process (`planner/demand_forecaster.py`).

    `nudge_learn` asks for another turn of this job.
    """

    planner: PlannerClient
    lease: LeaseState
    nudge_place: Callable[[], None]
    nudge_prefetch: Callable[[], None]
    nudge_learn: Callable[[], None]

    async def run_once(self) -> DemandCounts:
        """Have a part of the ended slots learned; nudge the jobs that use a new forecast.

        The loop rests before the next part, so that the planner has time for plans.
        """
        if not self.lease.is_acting:
            return DemandCounts()
        learned = await self.planner.learn(self.lease.epoch)
        if learned.is_new:
            self.nudge_place()
            self.nudge_prefetch()
        if learned.is_behind:
            self.nudge_learn()
        return DemandCounts(learned.slots, learned.series, learned.saved)
