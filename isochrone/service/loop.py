"""A periodic job: one function that runs every interval and whenever it is nudged.

Timer, nudge, failure and restart are one code path. A job takes no input and returns counts. A
failed job is not retried at once: its next turn is the retry.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import NoReturn

from isochrone.service.failure_log import FailureLog

REST_MAX_S = 6.0


class Loop:
    """Runs `run_once` until cancelled. One task owns `run()`; any code may `nudge()`."""

    def __init__(
        self,
        name: str,
        run_once: Callable[[], Awaitable[object]],
        interval_s: float,
        *,
        jitter: random.Random | None = None,
        share_max: float = 1.0,
        nudged: asyncio.Event | None = None,
    ) -> None:
        """Name the job. With `jitter` each wait varies by a fifth, so that a fleet spreads out.

        Turns take at most about `share_max` of the time, however often the job is nudged: after a
        long turn the loop rests (for at most REST_MAX_S), and nudges meanwhile become one turn.
        Setting `nudged` is the same as `nudge()`; pass it where the nudger is made before the loop.
        """
        self.name = name
        self.turns = 0
        self.failures = 0
        self.last_result: object = None
        self.last_turn_s = 0.0
        self.turns_s = 0.0
        self._run_once = run_once
        self._interval_s = interval_s
        self._jitter = jitter
        self._rest_per_turn_s = 1.0 / share_max - 1.0
        self._failure_log = FailureLog(name)
        self._nudged = nudged if nudged is not None else asyncio.Event()
        self._turned = asyncio.Condition()

    def __repr__(self) -> str:
        counts = f"turns={self.turns} failures={self.failures}"
        return f"<Loop {self.name} {counts} last_result={self.last_result}>"

    def nudge(self) -> None:
        """Ask for another turn soon."""
        self._nudged.set()

    async def run(self) -> NoReturn:
        """Run turn after turn until cancelled."""
        while True:
            # Cleared before the turn: a nudge during the turn asks for another one.
            self._nudged.clear()
            await self._turn()
            # A job that nudges itself must not starve the others of the event loop.
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
            self.last_result = await self._run_once()
        except Exception as error:
            self.failures += 1
            self._failure_log.record(error, monotonic())
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The clean-up of a cancelled turn failed; the task must end all the same.
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
