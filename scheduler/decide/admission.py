"""Who comes in when a whole fleet dials at once: so many a second, the others each at its time.

A registration costs milliseconds, and thousands in one moment would starve the lease. Whoever is
told to wait is given a place in line, and comes in when it returns at its time.
"""

from typing import Final

BURST_S: Final = 0.5
EARLY_S: Final = 0.5
LINE_MAX: Final = 20_000


class Admissions:
    """A line with a pace. It knows no clock: each question tells the time."""

    def __init__(self, per_s: float) -> None:
        self._step_s = 1.0 / per_s
        self._next = float("-inf")
        self._places: dict[str, float] = {}

    def wait_s(self, name: str, now: float) -> float:
        """Return 0 where `name` may come in now, else how long it should wait."""
        place = self._places.get(name)
        if place is not None:
            if place > now + EARLY_S:
                return place - now
            del self._places[name]
            return 0.0
        at = self.place(now)
        if at <= now + BURST_S:
            return 0.0
        if len(self._places) >= LINE_MAX:
            # Whoever left the line for good must not hold it for ever.
            self._places.clear()
        self._places[name] = at
        return at - now

    def place(self, not_before: float) -> float:
        """Return the next free time in the line, taken by nobody in particular."""
        at = max(self._next, not_before)
        self._next = at + self._step_s
        return at
