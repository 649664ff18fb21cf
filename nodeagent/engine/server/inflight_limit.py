"""Limits how many generations are in flight in this engine. Used on the event loop only."""

import asyncio

from isochrone.wire.errors import ApiError, ErrorCode


class InflightLimit:
    """Counts running and waiting generations; refuses those above the limit, or while draining."""

    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.in_flight = 0
        self.draining = False

    def check(self, count: int = 1) -> None:
        """Raise ApiError if `count` more generations are over the limit, or if draining."""
        if self.draining:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot take this request: this engine is draining",
                retry_after_s=1.0,
            )
        if self.in_flight + count > self._in_flight_max:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot queue {count} more: {self.in_flight} are running or waiting, the limit is"
                f" {self._in_flight_max}",
                retry_after_s=1.0,
            )

    def acquire(self, count: int = 1) -> None:
        """Count `count` more generations. Raises ApiError as `check` does, and counts none then."""
        self.check(count)
        self.in_flight += count
        self._is_idle.clear()

    def release(self, count: int = 1) -> None:
        """Count `count` generations less."""
        self.in_flight -= count
        if not self.in_flight:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; return False on timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True
