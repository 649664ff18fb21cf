"""Lets the tokens of many streams gather, so that one wake-up of the process serves them all.

When to pause is decided in `decide/token_gathering.py`.
"""

import asyncio
import time
from collections.abc import Callable

from router.decide.token_gathering import TokenGathering


class TokenGatherer:
    """Sleeps at the end of a turn of the event loop, where that saves wake-ups."""

    def __init__(self, gather_s: float, clock: Callable[[], float]) -> None:
        """Let tokens gather for at most `gather_s`; 0: never. `clock` gives monotonic seconds."""
        self._clock = clock
        self._is_on = gather_s > 0
        self._gathering = TokenGathering(gather_s)

    def note_token(self) -> None:
        """Note that bytes of a running stream were relayed."""
        if self._is_on and self._gathering.note_token():
            # Bytes that this turn has written are sent before callbacks of the next turn run.
            asyncio.get_running_loop().call_soon(self._pause)

    def note_other(self) -> None:
        """Note an event for which the process should stay awake."""
        self._gathering.note_other()

    def _pause(self) -> None:
        pause_s = self._gathering.pause_s(self._clock())
        if pause_s > 0:
            # The whole process is to sleep: a timer of the event loop would not stop it from
            # waking for every token.
            time.sleep(pause_s)
