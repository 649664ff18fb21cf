"""A duty: one function run every interval and whenever it is nudged.

Timer, nudge, failure and restart are one code path. A duty takes no input and answers with counts;
it does not retry, its next turn does.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import NoReturn

log = logging.getLogger(__name__)

REST_MAX_S = 6.0


class Loop:
    """Runs `run_once` for ever. One task owns `run()`; anyone may `nudge()`."""

    def __init__(
        self,
        name: str,
        run_once: Callable[[], Awaitable[object]],
        interval_s: float,
        *,
        jitter: random.Random | None = None,
        share_max: float = 1.0,
    ) -> None:
        """Name the duty. With `jitter` each wait varies by a fifth, lest a fleet march in step.

        However often it is nudged, turns take at most about `share_max` of the time: what takes
        long is done less often (a rest of REST_MAX_S at most), and many nudges become one turn.
        """
        self.name = name
        self.turns = 0
        self.failures = 0
        self.last: object = None
        self.last_turn_s = 0.0
        self.turns_s = 0.0
        self._run_once = run_once
        self._interval_s = interval_s
        self._jitter = jitter
        self._rest_per_turn_s = 1.0 / share_max - 1.0
        self._failing = ""
        self._nudged = asyncio.Event()
        self._turned = asyncio.Condition()

    def __repr__(self) -> str:
        return f"<Loop {self.name} turns={self.turns} failures={self.failures} last={self.last}>"

    def nudge(self) -> None:
        """Say "look again"; carries nothing."""
        self._nudged.set()

    async def run(self) -> NoReturn:
        """Turn until cancelled."""
        while True:
            # Cleared before the turn, not after it: a nudge during the turn must count.
            self._nudged.clear()
            await self._turn()
            # A duty that nudges itself must not starve the others of the event loop.
            await asyncio.sleep(min(REST_MAX_S, self._rest_per_turn_s * self.last_turn_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s()):
                    await self._nudged.wait()

    async def wait_turns(self, count: int) -> None:
        """Wait until `count` more turns have ended. For tests, in place of sleeping."""
        target = self.turns + count
        async with self._turned:
            await self._turned.wait_for(lambda: self.turns >= target)

    async def _turn(self) -> None:
        began = monotonic()
        try:
            self.last = await self._run_once()
            self._failing = ""
        except Exception as error:
            self.failures += 1
            # Said once for each reason: a disk that is full for a day must not fill the logs too.
            if repr(error) != self._failing:
                log.exception("turn failed", extra={"fields": {"duty": self.name}})
            self._failing = repr(error)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # What was cancelled may fail as it is cleaned up: it is to end all the same.
                raise asyncio.CancelledError from error
        self.last_turn_s = monotonic() - began
        self.turns_s += self.last_turn_s
        async with self._turned:
            self.turns += 1
            self._turned.notify_all()

    def _wait_s(self) -> float:
        if self._jitter is None:
            return self._interval_s
        return self._interval_s * self._jitter.uniform(0.8, 1.2)
