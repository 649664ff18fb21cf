"""Runs Python's full garbage collections on new objects only.

A full collection walks every object, and requests wait for it: 12 ms of CPU for the state of ten
thousand replicas, 200 ms with the leftovers of thousands of failed pings. Python runs one whenever
enough objects have survived, so while a table is adopted, too. Here, a turn each second collects
what was made since the last one and freezes what is left (`gc.freeze`). When many objects are made,
as for a new table or pings of thousands of nodes, it comes sooner. A frozen object is still freed
by its reference count, but a cycle among frozen objects is not. So all objects are walked once they
are twice as many as after the last walk.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

FROZEN_MIN: Final = 500_000
"""Fewer objects are not worth a walk: they take about 100 MB."""

TURNS_PER_COUNT: Final = 60
"""Once in this many turns it is checked whether there may be enough frozen objects for a walk."""

LOOK_INTERVAL_S: Final = 0.1
LOOKS_PER_TURN: Final = 10
"""A collection comes at the latest after this many looks: each second."""

GROWN_MAX: Final = 2
"""A collection comes sooner after this many collections of the middle generation: about 14,000 more
objects than before, which take two or three milliseconds."""

_NEVER: Final = 1_000_000_000


class CollectedObjects(NamedTuple):
    """How many objects one turn freed, and whether it walked all objects for them."""

    collected: int = 0
    walked: bool = False


class CollectInTurns:
    """Collects in turns; Python itself collects the youngest objects only."""

    def __init__(self, frozen_min: int = FROZEN_MIN) -> None:
        """Walk all objects once `frozen_min` are frozen, and later at twice the last number."""
        self._walk_at = frozen_min
        self._frozen_min = frozen_min
        self._frozen = self._blocks = 0
        """The frozen objects when they were last counted, and the blocks of memory in use then."""
        self._turns = self._looks = 0

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Stop Python's own full collections within, and freeze all that exists by now."""
        thresholds = gc.get_threshold()
        gc.set_threshold(*thresholds[:2], _NEVER)
        gc.collect()
        gc.freeze()
        self._count()
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    async def look(self) -> CollectedObjects:
        """Take a turn if it is time."""
        self._looks += 1
        if self._looks < LOOKS_PER_TURN and gc.get_count()[2] < GROWN_MAX:
            return CollectedObjects()
        self._looks = 0
        return await self.run_once()

    async def run_once(self) -> CollectedObjects:
        """Collect the objects made since the last turn, then freeze the others."""
        collected = gc.collect()
        gc.freeze()
        self._turns += 1
        if self._turns % TURNS_PER_COUNT or not self._is_walk_due():
            return CollectedObjects(collected)
        gc.unfreeze()
        collected += gc.collect()
        gc.freeze()
        self._count()
        self._walk_at = max(self._frozen_min, 2 * self._frozen)
        return CollectedObjects(collected, walked=True)

    def _is_walk_due(self) -> bool:
        """Return whether so many objects are frozen that all should be walked.

        To count them Python goes through all of them: 10 ms, and in a busy process 30, for half a
        million. An object is at least one block of memory, and the number of blocks is known. So
        they are counted only when enough blocks were added since the last time.
        """
        blocks = sys.getallocatedblocks()
        self._blocks = min(self._blocks, blocks)
        if self._frozen + blocks - self._blocks < self._walk_at:
            return False
        self._count()
        return self._frozen >= self._walk_at

    def _count(self) -> None:
        self._frozen, self._blocks = gc.get_freeze_count(), sys.getallocatedblocks()
