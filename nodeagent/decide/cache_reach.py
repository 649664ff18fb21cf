"""How far back a prefix cache reaches, from events that name the blocks it stores and evicts.

The cache evicts what was used least recently. So when it evicts a block, it has lost what was used
no later than that. Events do not tell the last use of a block, but when it was stored, which is no
later. The latest such time is kept: most evicted blocks, such as the ends of prompts, were used by
one request alone, so that it is a little too early at most (`ops/sim/cache_knowledge.md`).
"""

from collections.abc import Hashable, Iterable

BLOCKS_MAX = 1_000_000
"""Blocks that are known at a time; those stored first are forgotten. A GPU has fewer: only events
that were lost leave more."""


class CacheReach:
    """The blocks of one cache, and since when it has all that was used."""

    def __init__(self, empty_since_s: float | None) -> None:
        """`empty_since_s` is when the cache was last empty, on a monotonic clock; None if that is
        not known, because the engine began before its events were read."""
        self.since_s = empty_since_s
        """The cache has all that was used since then; None if nothing is known."""
        self._stored_at_s: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._stored_at_s)

    def store(self, blocks: Iterable[Hashable], now_s: float) -> None:
        """Note that blocks were stored. Those that already are keep their time."""
        stored = self._stored_at_s
        for block in blocks:
            stored.setdefault(block, now_s)
        while len(stored) > BLOCKS_MAX:
            del stored[next(iter(stored))]

    def remove(self, blocks: Iterable[Hashable]) -> None:
        """Note that blocks were evicted. Nothing is known about a block that was stored before the
        events began."""
        for block in blocks:
            stored_at_s = self._stored_at_s.pop(block, None)
            if stored_at_s is not None and (self.since_s is None or stored_at_s > self.since_s):
                self.since_s = stored_at_s

    def clear(self, now_s: float) -> None:
        """Note that the cache was emptied."""
        self._stored_at_s.clear()
        self.since_s = now_s
