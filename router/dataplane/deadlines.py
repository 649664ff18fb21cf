"""Deadlines without timers: each waiting object has a due time, and one periodic sweep checks all.

Creating and cancelling a timer for each wait costs more than all other bookkeeping of that wait.
Deadlines here are seconds long, so a sweep every 0.1 s is exact enough.

After the event loop was blocked it runs timers before it reads the sockets. A sweep therefore
compares with the time at which it was due to run: a peer is not timed out for a delay of our own.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

SWEEP_S: Final = 0.1
NEVER: Final = inf


class HasDeadline(Protocol):
    """An object that must not wait past `due_s` (monotonic seconds)."""

    due_s: float

    def on_due(self) -> None:
        """Handle the expired deadline: set a new `due_s`, or leave `Deadlines`."""


class Deadlines:
    """All objects of this process that wait for bytes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Watch nothing yet. `clock` returns monotonic seconds."""
        self._clock = clock
        self._watched: set[HasDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_sweep_s = 0.0

    def __len__(self) -> int:
        """Return the number of watched objects."""
        return len(self._watched)

    def add(self, watched: HasDeadline) -> None:
        """Watch one more object."""
        self._watched.add(watched)

    def discard(self, watched: HasDeadline) -> None:
        """Stop watching an object."""
        self._watched.discard(watched)

    def start(self) -> None:
        """Sweep periodically in the running loop."""
        self._next_sweep_s = self._clock() + SWEEP_S
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def stop(self) -> None:
        """Cancel the next sweep."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_s = self._next_sweep_s
        self.start()
        for watched in [watched for watched in self._watched if watched.due_s <= now_s]:
            # An earlier `on_due` of this sweep may have moved this deadline.
            if watched.due_s <= now_s:
                watched.due_s = NEVER
                watched.on_due()
