"""Collects garbage, without walking the whole fleet in memory: nothing else does in this process.

A conversation is over a hundred objects that live as long as it does. A full collection walks all
of them, a second with thousands of peers, and nobody is served meanwhile; it finds next to nothing,
for what a fleet leaves behind is freed without it. So what lives is put out of its reach, every few
seconds, and what is left to walk is what has come since. What conversations leave when they end is
looked for once as many have ended as there are; what else was left, once in hours.
"""

import gc
from typing import Final, NamedTuple

from scheduler.acting import Acting

CLOSED_MIN: Final = 1000
"""Fewer conversations leave too little to be worth a walk."""
TURNS_MAX: Final = 5000
"""So many turns after a walk there is another, whoever has ended."""


class GarbageCounts(NamedTuple):
    """One turn: how many objects were garbage, and whether all of the fleet was walked for them."""

    collected: int = 0
    walked: bool = False


class CollectGarbage:
    """Whether or not this process acts: a standby has what it had when it did."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._seen_ended = 0
        self._turns = 0

    async def run_once(self) -> GarbageCounts:
        """Collect what has come since, and put what lives out of reach."""
        acting = self._acting
        self._turns += 1
        ended = acting.ended - self._seen_ended
        walks = ended > max(CLOSED_MIN, len(acting.peers)) or self._turns > TURNS_MAX
        if walks:
            self._seen_ended, self._turns = acting.ended, 0
            gc.unfreeze()
        collected = gc.collect()
        gc.freeze()
        return GarbageCounts(collected, walks)
