"""Runs Python's full garbage collections on new objects only.

A full collection walks every object, and requests wait for it: 12 ms of CPU for the state of ten
thousand replicas, 200 ms with the leftovers of thousands of failed pings. Here, the objects that a
collection leaves are frozen (`gc.freeze`), so that the next one walks only newer ones. One runs
each second. When many objects are made, as for a new table or pings of thousands of nodes, Python
itself runs one sooner. A frozen object is still freed by its reference count, but a cycle among
frozen objects is not. So all objects are walked once they are twice as many as after the last walk.
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

COLLECT_INTERVAL_S: Final = 1.0

GROWN_MAX: Final = 1
"""Python runs a full collection after more collections of the middle generation than this: about
14,000 more objects than before (44,000 from Python 3.13 on), which take two or three milliseconds
(or nine)."""

FULL_GENERATION: Final = 2


class CollectedObjects(NamedTuple):
    """How many objects one turn freed, and whether it walked all objects for them."""

    collected: int = 0
    walked: bool = False


class CollectInTurns:
    """Collects what is new, in turns and when Python does, and freezes what is left."""

    def __init__(self, frozen_min: int = FROZEN_MIN) -> None:
        """Walk all objects once `frozen_min` are frozen, and later at twice the last number."""
        self._walk_at = frozen_min
        self._frozen_min = frozen_min
        self._frozen = self._blocks = 0
        """The frozen objects when they were last counted, and the blocks of memory in use then."""
        self._turns = 0

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Freeze all that exists by now, and what full collections within leave."""
        thresholds = gc.get_threshold()
        gc.set_threshold(*thresholds[:2], GROWN_MAX)
        gc.callbacks.append(_freeze_the_rest)
        for _ in range(2):
            # Python's next one waits for a quarter as many objects as the last one left unfrozen:
            # after the first that is all of them, after the second next to nothing.
            gc.collect()
        self._count()
        try:
            yield
        finally:
            gc.callbacks.remove(_freeze_the_rest)
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    async def run_once(self) -> CollectedObjects:
        """Collect the objects made since the last turn, then freeze what is left."""
        collected = gc.collect()
        self._turns += 1
        if self._turns % TURNS_PER_COUNT or not self._is_walk_due():
            return CollectedObjects(collected)
        gc.unfreeze()
        collected += gc.collect()
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


def _freeze_the_rest(phase: str, info: dict[str, int]) -> None:
    """Freeze what a full collection has left, also one that Python ran by itself."""
    if phase == "stop" and info["generation"] == FULL_GENERATION:
        gc.freeze()
