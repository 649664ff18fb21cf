"""Connection admission: how many peers may register at once when the whole fleet connects.

A registration costs milliseconds, and thousands at once would delay those that are under way.
"""

from typing import Final

BURST_S: Final = 0.5
"""As many peers as the rate allows in this time may be admitted at once."""

UNSERVED_MAX: Final = 48
"""Peers that are admitted and not served yet; others wait."""

UNSERVED_TIMEOUT_S: Final = 10.0
"""An admitted peer counts as gone after this time."""


class Places:
    """Times at a steady rate, each taken once."""

    def __init__(self, per_s: float) -> None:
        self._step_s = 1.0 / per_s
        self._next = float("-inf")

    def take(self, not_before: float) -> float:
        """Return the next free time, and take it."""
        place = max(self._next, not_before)
        self._next = place + self._step_s
        return place

    def wait_s(self, now: float) -> float:
        """Return in how many seconds the next time comes; 0 if it has passed."""
        return max(0.0, self._next - now)


class ConnectionAdmission:
    """When the next peer may be admitted. The caller passes the time to each method."""

    def __init__(self, per_s: float) -> None:
        self._places = Places(per_s)
        self._unserved: dict[str, float] = {}
        """When each peer was admitted that is not served yet, in this order."""

    def wait_s(self, now: float) -> float:
        """Return 0 if a peer may be admitted now, else the longest time until one may be.

        The time is shorter if a peer is `served` meanwhile.
        """
        while self._unserved and self._oldest + UNSERVED_TIMEOUT_S <= now:
            del self._unserved[next(iter(self._unserved))]
        if len(self._unserved) >= UNSERVED_MAX:
            return self._oldest + UNSERVED_TIMEOUT_S - now
        return self._places.wait_s(now + BURST_S)

    def admit(self, name: str, now: float) -> None:
        """Count peer `name` until it is `served`, or for UNSERVED_TIMEOUT_S."""
        self._unserved.pop(name, None)
        self._unserved[name] = now
        self._places.take(now)

    def served(self, name: str) -> None:
        """Note that an admitted peer was served or is gone."""
        self._unserved.pop(name, None)

    @property
    def _oldest(self) -> float:
        return next(iter(self._unserved.values()))
