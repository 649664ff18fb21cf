"""Ends requests to a scheduler that hangs: its kernel keeps their connections open.

The control connection notices a hang after 15 s, and belongs to a router's main process alone. So
each process asks the scheduler itself, but only while one of its requests lasts long. A transfer
may take any time, and an answer may wait for a slow database, as long as the process answers this.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

LOOK_INTERVAL_S: Final = 1.0
PATIENCE_S: Final = 2.0
"""A scheduler is probed if a request to it has been open for this long; most take less."""

ANSWER_TIMEOUT_S: Final = 3.0
"""How long a scheduler may take to answer that it runs: longer than its event loop is ever busy."""

IsAnswering = Callable[[str, float], Awaitable[bool]]
"""(URL of a scheduler, timeout in seconds) to whether it has answered."""


class SilenceWatch:
    """The open requests of one process."""

    def __init__(self, is_answering: IsAnswering) -> None:
        """Start without requests."""
        self._is_answering = is_answering
        self._open: dict[asyncio.Timeout, tuple[str, float]] = {}
        """By request: the scheduler's URL, and when the request began."""
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watched(self, url: str) -> AsyncIterator[None]:
        """Watch over a request to the scheduler `url`. Raises TimeoutError if that hangs."""
        async with asyncio.timeout(None) as timeout:
            self._open[timeout] = url, asyncio.get_running_loop().time()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                del self._open[timeout]

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self) -> None:
        """Ask each scheduler with long requests, until no request is open."""
        clock = asyncio.get_running_loop().time
        while self._open:
            await asyncio.sleep(LOOK_INTERVAL_S)
            old_s = clock() - PATIENCE_S
            urls = {url for url, begin_s in self._open.values() if begin_s <= old_s}
            await asyncio.gather(*(self._end_if_silent(url) for url in urls))

    async def _end_if_silent(self, url: str) -> None:
        asked_s = asyncio.get_running_loop().time()
        if await self._is_answering(url, ANSWER_TIMEOUT_S):
            return
        for timeout, (of_url, begin_s) in list(self._open.items()):
            # A request that began later may meet a scheduler that has come back. One whose timeout
            # has expired is still here while its task cleans up, and cannot be rescheduled.
            if of_url == url and begin_s <= asked_s and not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())
