"""Has the planner learn each slot of demand once it is over, and asks it again for what follows."""

from typing import NamedTuple

from scheduler.acting import Acting


class DemandCounts(NamedTuple):
    """One turn's counts: slots learned, series known, series saved."""

    slots: int = 0
    series: int = 0
    saved: int = 0


class LearnDemand:
    """The forecast itself lives in the planner, and is its alone (`planner/forecast.py`)."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> DemandCounts:
        """Have learned what has ended."""
        acting = self._acting
        foretold = DemandCounts()
        is_behind = True
        while is_behind and acting.is_acting:
            learned = await acting.planner.learn(acting.epoch)
            foretold = DemandCounts(foretold.slots + learned.slots, learned.series, learned.saved)
            is_behind = learned.is_behind
            if learned.is_news:
                acting.nudge_place()
                acting.nudge_prefetch()
        return foretold
