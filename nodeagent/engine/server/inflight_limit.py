"""How much is open in this engine, and whether more may come in. On the event loop alone."""

import asyncio

from isochrone.wire.errors import ApiError, ErrorCode


class Entrance:
    """Counts who is inside; refuses one more than there is room for, and all while draining."""

    def __init__(self, open_max: int) -> None:
        self._open_max = open_max
        self._empty = asyncio.Event()
        self._empty.set()
        self.open = 0
        self.draining = False

    def admit(self, count: int = 1) -> None:
        """Refuse at once where so many more cannot be taken."""
        if self.draining:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot take this request: this engine is draining",
                retry_after_s=1.0,
            )
        if self.open + count > self._open_max:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot queue {count} more: {self.open} are running or waiting, the limit is"
                f" {self._open_max}",
                retry_after_s=1.0,
            )

    def enter(self, count: int = 1) -> None:
        """Count in who was admitted."""
        self.open += count
        self._empty.clear()

    def leave(self, count: int = 1) -> None:
        """Count out."""
        self.open -= count
        if not self.open:
            self._empty.set()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is open; False where time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
