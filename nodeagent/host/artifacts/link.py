"""The node's network link for artifacts: limits its rate and measures the rate of fetches.

A link may be part of another one, with a lower limit: its bytes count against both limits, and its
own rate is not measured.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from nodeagent.decide.bandwidth import BandwidthLimit

MEASURED_BYTES_MIN: Final = 8 * 1024 * 1024
"""Smaller transfers end before TCP reaches its full speed, and are not measured."""

NEW_RATE_WEIGHT: Final = 0.3
"""Weight of the newest transfer in the moving average."""


class TransferLink:
    """A limit on bytes per second, and a moving average of the measured rate (0: none yet)."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float],
        parent: "TransferLink | None" = None,
    ) -> None:
        """Limit the link to `bytes_per_s` (0: no limit), as a part of `parent` if there is one."""
        self.measured_bytes_per_s = 0.0
        self._limit = BandwidthLimit(bytes_per_s)
        self.clock = clock
        self._parent = parent

    def limited_to(self, bytes_per_s: float) -> "TransferLink":
        """Return a part of this link with a lower limit; 0 adds no limit."""
        return TransferLink(bytes_per_s, self.clock, self) if bytes_per_s > 0 else self

    async def throttle(self, size_bytes: int) -> float:
        """Wait until `size_bytes` more may be transferred; return the seconds waited."""
        waited_s = await self._parent.throttle(size_bytes) if self._parent else 0.0
        wait_s = self._limit.wait_s(size_bytes, self.clock())
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return waited_s + max(0.0, wait_s)

    def record(self, size_bytes: int, duration_s: float) -> None:
        """Add a transfer from another PoP or an origin to the moving average."""
        if self._parent is not None or size_bytes < MEASURED_BYTES_MIN or duration_s <= 0:
            return
        rate = size_bytes / duration_s
        before = self.measured_bytes_per_s
        self.measured_bytes_per_s = before + NEW_RATE_WEIGHT * (rate - before) if before else rate
