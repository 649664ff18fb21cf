"""Runs Python's garbage collector without walking every connected peer's objects each time.

A connection is over a hundred objects that live as long as it does. A full collection walks all of
them, which takes a second with thousands of peers, stops the event loop meanwhile, and finds almost
nothing: reference counting frees nearly everything. So after each collection the survivors are
frozen (`gc.freeze`), and the next one walks only newer objects. The whole heap is walked once as
many connections have closed as are open, and otherwise every few hours. Automatic collection is off
(`app.py`).
"""

import gc
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from scheduler.state.peers.peer_registry import PeerRegistry

CLOSED_MIN: Final = 1000
"""Fewer closed connections leave too little behind to be worth walking the heap."""
TURNS_MAX: Final = 5000
"""After this many turns the whole heap is walked whatever has closed."""


class GarbageCounts(NamedTuple):
    """How many objects one turn freed, and whether it walked the whole heap for them."""

    collected: int = 0
    walked: bool = False


@dataclass(eq=False)
class CollectGarbage:
    """Runs on a standby too: it may still hold what it had while it acted."""

    peers: PeerRegistry
    _closed_at_walk: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)

    async def run_once(self) -> GarbageCounts:
        """Collect the objects made since the last turn, then freeze the others."""
        self._turns += 1
        closed = self.peers.closed_count - self._closed_at_walk
        walks = closed > max(CLOSED_MIN, len(self.peers)) or self._turns > TURNS_MAX
        if walks:
            self._closed_at_walk, self._turns = self.peers.closed_count, 0
            gc.unfreeze()
        collected = gc.collect()
        gc.freeze()
        return GarbageCounts(collected, walks)
