"""Who comes in when a whole fleet dials at once: so many a second, the others each at its time.

A registration costs milliseconds, and thousands in one moment would starve the lease. Whoever is
told to wait is given a place in line, and comes in when it returns at its time. A place that comes
too early costs as much as a registration, so the line moves as fast as those within are served.
"""

from typing import Final

BURST_S: Final = 0.5  # whose place is so near comes in at once
EARLY_S: Final = 0.5  # so long before its time a place is good
LINE_MAX: Final = 20_000  # places kept
AT_ONCE_MAX: Final = 48  # within and not served yet
WITHIN_S: Final = 10.0  # after which one counts as gone
FULL_S: Final = 1.0  # how long who comes to a full house waits at least
STEP_MAX_S: Final = 0.25  # between two, however slowly those within are served
LEARNS: Final = 0.05  # what one who is served adds to the pace


class ConnectionAdmission:
    """A line with a pace, and a bound on those within it who are not served yet.

    It knows no clock: each question tells the time.
    """

    def __init__(self, per_s: float) -> None:
        self._step_s = self._step_min_s = 1.0 / per_s
        self._next = float("-inf")
        self._places: dict[str, float] = {}
        self._within: dict[str, float] = {}
        self._served_at = float("-inf")

    def wait_s(self, name: str, now: float) -> float:
        """Return 0 where `name` may come in now, else how long it should wait.

        Who comes in is within until `served`, or for WITHIN_S.
        """
        place = self._places.get(name)
        if place is None:
            place = self.place(now)
            if place > now + BURST_S:
                return self._keep(name, place) - now
        elif place > now + EARLY_S:
            return place - now
        else:
            del self._places[name]
        if self._is_full(now):
            return self._keep(name, self.place(now + FULL_S)) - now
        self._within[name] = now
        return 0.0

    def served(self, name: str, now: float) -> None:
        """Let another in: this one is served, or gone. The line takes up the pace of service."""
        was_full = len(self._within) >= AT_ONCE_MAX
        if self._within.pop(name, None) is None:
            return
        since_s, self._served_at = now - self._served_at, now
        seen_s = min(since_s, STEP_MAX_S) if was_full else self._step_min_s
        self._step_s += LEARNS * (max(seen_s, self._step_min_s) - self._step_s)

    def place(self, not_before: float) -> float:
        """Return the next free time in the line, taken by nobody in particular."""
        at = max(self._next, not_before)
        self._next = at + self._step_s
        return at

    def _is_full(self, now: float) -> bool:
        if len(self._within) >= AT_ONCE_MAX:
            late = [name for name, since in self._within.items() if now - since > WITHIN_S]
            for name in late:
                del self._within[name]
        return len(self._within) >= AT_ONCE_MAX

    def _keep(self, name: str, place: float) -> float:
        if len(self._places) >= LINE_MAX:
            # Whoever left the line for good must not hold it for ever.
            self._places.clear()
        self._places[name] = place
        return place
