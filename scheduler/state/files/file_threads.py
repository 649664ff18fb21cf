"""Runs calls to a disk or a bucket in threads, which tenants share.

Nothing ends a call that hangs, so it keeps its thread. One tenant's calls never keep all threads,
a call waits for its turn for a limited time, and the process ends without waiting for any.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from isochrone.fair_shares import FairShares
from isochrone.service.threads import start_daemon_thread
from isochrone.wire.errors import ApiError, ErrorCode

THREADS_MAX: Final = 16
"""Calls at a time."""

TURN_TIMEOUT_S: Final = 15.0
"""How long a call waits for its turn. The wait is this long only while many calls hang."""

RETRY_AFTER_S: Final = 10.0

T = TypeVar("T")


class FairTurns:
    """Turns that a limited number of calls have at a time, and the calls that wait for one."""

    def __init__(self, at_once_max: int) -> None:
        """A tenant has at most as many turns as are free, so one alone has half."""
        self._shares = FairShares(at_once_max)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The tenant that had no turn for the longest time is first."""

    async def take(self, holder: str, *, is_patient: bool = False) -> None:
        """Wait for a turn of the tenant `holder`: with `is_patient` for as long as it takes.

        Raises TimeoutError if it does not come soon.
        """
        if holder not in self._waiting and self._shares.take(holder, 1):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            async with asyncio.timeout(None if is_patient else TURN_TIMEOUT_S):
                # The turn itself is not cancelled: it may be given at the moment of the
                # cancellation.
                await asyncio.shield(turn)
        except BaseException:
            self._leave(holder, turn)
            raise

    def give_back(self, holder: str) -> None:
        """End a turn; others begin."""
        self._shares.give_back(holder, 1)
        while self._start_next():
            pass

    def _leave(self, holder: str, turn: asyncio.Future[None]) -> None:
        """Wait no longer; a turn that was just given goes to the next call."""
        if turn.done():
            self.give_back(holder)
            return
        turns = self._waiting[holder]
        turns.remove(turn)
        if not turns:
            del self._waiting[holder]

    def _start_next(self) -> bool:
        """Give a turn to the first tenant that may have one more; return whether any may."""
        for holder, turns in self._waiting.items():
            if not self._shares.take(holder, 1):
                continue
            turns.popleft().set_result(None)
            del self._waiting[holder]
            if turns:
                self._waiting[holder] = turns
            return True
        return False


class FileThreads:
    """The threads for calls."""

    def __init__(self) -> None:
        self._turns = FairTurns(THREADS_MAX)

    async def run(self, holder: str, call: Callable[[], T], *, is_patient: bool = False) -> T:
        """Return what a call of the tenant `holder` returns.

        Raises ApiError 503 if it gets no thread in time, unless it `is_patient`, or if the system
        has none left. Once it runs, it runs to its end, even if this is cancelled.
        """
        try:
            await self._turns.take(holder, is_patient=is_patient)
        except TimeoutError:
            raise no_answer() from None
        try:
            running = start_daemon_thread("files", call)
        except RuntimeError as error:
            self._turns.give_back(holder)
            raise no_answer() from error
        running.add_done_callback(lambda _: self._turns.give_back(holder))
        return await asyncio.shield(running)


def no_answer() -> ApiError:
    """Return the error for a call that takes too long."""
    return ApiError(
        ErrorCode.UNAVAILABLE,
        "cannot use stored files now: the disk or bucket they lie in does not answer",
        retry_after_s=RETRY_AFTER_S,
    )
