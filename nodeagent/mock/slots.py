"""Places for the requests that the mock engine runs, in the order of their priority.

A waiting request takes the place of the newest one of lower priority that runs, which waits and
goes on later. So does the embedded engine.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True, eq=False)
class MockPlace:
    """The place of one request: held, or waited for."""

    priority: int
    number: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def order(self) -> tuple[int, int]:
        """The order of waiting: by priority, then by arrival."""
        return -self.priority, self.number


class MockSlots:
    """`size` places."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers = count()
        self._running: list[MockPlace] = []
        self._waiting: list[MockPlace] = []

    @property
    def running(self) -> int:
        """The places that are held."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The requests that wait for a place."""
        return len(self._waiting)

    @contextmanager
    def join(self, priority: int) -> Iterator[MockPlace]:
        """Wait for a place, and hold it to the end. `MockPlace.granted` is set while it is held."""
        place = MockPlace(priority, next(self._numbers))
        self._waiting.append(place)
        self._assign()
        try:
            yield place
        finally:
            (self._running if place.granted.is_set() else self._waiting).remove(place)
            self._assign()

    def _assign(self) -> None:
        """Give places to waiting requests, by priority and then by arrival."""
        self._waiting.sort(key=lambda place: place.order)
        while self._waiting:
            if len(self._running) >= self._size:
                last = max(self._running, key=lambda place: place.order)
                if last.priority >= self._waiting[0].priority:
                    return
                self._running.remove(last)
                last.granted.clear()
                self._waiting.append(last)
            first = self._waiting.pop(0)
            self._running.append(first)
            first.granted.set()
            self._waiting.sort(key=lambda place: place.order)
