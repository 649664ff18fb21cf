"""This node's way to weights elsewhere: how fast it may go, and how fast it was seen to go.

A slower link is a part of a faster one: its bytes count against both bounds, and what it is held
back to says nothing of how fast the way is.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from nodeagent.decide.bandwidth import BandwidthLimit

SEEN_BYTES_MIN: Final = 8 * 1024 * 1024
"""What is smaller is over before its connection has found its speed."""

SEEN_RATE: Final = 0.3
"""How much of what was seen last goes into what is believed."""


class TransferLink:
    """A bound on bytes per second, and the rate seen; 0 where nothing large has come yet."""

    def __init__(
        self, bytes_per_s: float, clock: Callable[[], float], within: "TransferLink | None" = None
    ) -> None:
        """Go so fast at most, 0 for no bound; with `within`, as a part of another link."""
        self.seen_bytes_per_s = 0.0
        self._bandwidth = BandwidthLimit(bytes_per_s)
        self.clock = clock
        self._within = within

    def slower(self, bytes_per_s: float) -> "TransferLink":
        """Return a part of this link that goes so fast at most; 0 is no bound of its own."""
        return TransferLink(bytes_per_s, self.clock, self) if bytes_per_s > 0 else self

    async def keep_pace(self, size_bytes: int) -> float:
        """Wait until as many bytes more may come; return how long that was."""
        waited_s = await self._within.keep_pace(size_bytes) if self._within else 0.0
        wait_s = self._bandwidth.wait_s(size_bytes, self.clock())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return waited_s + max(0.0, wait_s)

    def saw(self, size_bytes: int, took_s: float) -> None:
        """Learn from what came from another city or the origin."""
        if self._within is not None or size_bytes < SEEN_BYTES_MIN or took_s <= 0:
            return
        rate = size_bytes / took_s
        before = self.seen_bytes_per_s
        self.seen_bytes_per_s = before + SEEN_RATE * (rate - before) if before else rate
