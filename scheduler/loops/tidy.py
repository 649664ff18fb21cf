"""Keeps Python's garbage collector from walking the whole fleet in memory.

A conversation is over a hundred objects that live as long as it does. A full collection walks all
of them, a second with thousands of peers, and nobody is served meanwhile; it finds next to nothing,
for what a fleet leaves behind is freed without it. What lives is put out of its reach. What
conversations leave when they end is looked for once as many have ended as there are.
"""

import gc
from typing import Final, NamedTuple

from scheduler.acting import Acting

ENDED_MIN: Final = 1000
"""Fewer conversations leave too little to be worth a walk."""


class Tidied(NamedTuple):
    """One turn's counts, of objects."""

    out_of_reach: int
    collected: int


class Tidy:
    """Whether or not this process acts: a standby has what it had when it did."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._seen_ended = 0

    async def run_once(self) -> Tidied:
        """Put what lives out of reach, after a walk where that is worth it."""
        acting, collected = self._acting, 0
        if acting.ended - self._seen_ended > max(ENDED_MIN, len(acting.peers)):
            self._seen_ended = acting.ended
            gc.unfreeze()
            collected = gc.collect()
        gc.freeze()
        return Tidied(gc.get_freeze_count(), collected)
