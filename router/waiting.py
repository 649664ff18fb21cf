"""The bounded queue of requests for which every replica is full: first come, first woken."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from isochrone.wire.ids import DeploymentId

LOOK_AGAIN_S: Final = 0.25
"""Room may come of another router's request ending, which nobody here hears of."""


class QueueFull(Exception):
    """As many wait already as may."""


class Waiting:
    """Who waits for room, by deployment."""

    def __init__(self, depth_max: int) -> None:
        """Let at most `depth_max` wait, over all deployments."""
        self.depth = 0
        self._depth_max = depth_max
        self._waiters: dict[DeploymentId, deque[asyncio.Future[None]]] = {}

    def wake(self, deployment_id: DeploymentId) -> None:
        """Room may have come: let the first who waits look."""
        waiters = self._waiters.get(deployment_id)
        while waiters:
            waiter = waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def wait(self, deployment_id: DeploymentId, timeout_s: float) -> None:
        """Wait until woken, or for a moment; raise QueueFull where too many do already."""
        if self.depth >= self._depth_max:
            raise QueueFull
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(deployment_id, deque())
        waiters.append(waiter)
        self.depth += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, LOOK_AGAIN_S)):
                    await waiter
        finally:
            self.depth -= 1
            with suppress(ValueError):
                waiters.remove(waiter)
            if not waiters and self._waiters.get(deployment_id) is waiters:
                del self._waiters[deployment_id]
