"""Has weights fetched before the peak that needs them, by what is foretold some hours ahead."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.decide.prefetch import Foreseen
from scheduler.store.pool import transaction
from scheduler.store.prefetch import record_prefetch_changes


class WeightPrefetchCounts(NamedTuple):
    """One turn's counts."""

    wished: int = 0
    arrived: int = 0
    ended: int = 0


class PrefetchWeights:
    """Nothing is started by it: a start finds its weights on the disk, and the planner knows."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> WeightPrefetchCounts:
        """Have foreseen, write, tell."""
        acting = self._acting
        if not acting.is_acting:
            return WeightPrefetchCounts()
        foreseen = await acting.planner.foresee(acting.heard())
        if foreseen != Foreseen():
            concerned = {wish.node_id for wish in foreseen.new}
            concerned |= {over.wish.node_id for over in foreseen.ended}
            with acting.owing(concerned):
                async with transaction(acting.pool) as connection:
                    await record_prefetch_changes(connection, acting.epoch, foreseen)
                await acting.tell_assignments(sorted(concerned))
        return WeightPrefetchCounts(len(foreseen.new), len(foreseen.arrived), len(foreseen.ended))
