"""Deadlines without timers: whatever waits says until when, and one sweep looks at all of them.

A timer made and cancelled for each wait costs more than the wait's bookkeeping. Deadlines here are
seconds, so a tenth of one is exact enough.

A loop that was held up runs its timers first, and only then reads what came meanwhile. So a sweep
judges by the time at which it should have come: who was kept waiting by the loop is not to blame.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

SWEEP_S: Final = 0.1
NEVER: Final = inf


class HasDeadline(Protocol):
    """Something that must not wait past `due_s` (monotonic seconds)."""

    due_s: float

    def on_due(self) -> None:
        """Its time is up. It sets a new `due_s` or takes itself off."""


class Deadlines:
    """Everything in this process that waits for bytes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Watch nothing yet."""
        self._clock = clock
        self._watched: set[HasDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0

    def __len__(self) -> int:
        """Return how many are watched."""
        return len(self._watched)

    def add(self, waits: HasDeadline) -> None:
        """Watch one more."""
        self._watched.add(waits)

    def discard(self, waits: HasDeadline) -> None:
        """Watch it no longer."""
        self._watched.discard(waits)

    def start(self) -> None:
        """Sweep from now on, in the running loop."""
        self._next_s = self._clock() + SWEEP_S
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        """Sweep no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_s = self._next_s
        self.start()
        for waits in [waits for waits in self._watched if waits.due_s <= now_s]:
            # What one did may have given another new time.
            if waits.due_s <= now_s:
                waits.due_s = NEVER
                waits.on_due()
