"""Connection admission: how many peers may register per second when the whole fleet connects.

A registration costs milliseconds, and thousands at once would delay the renewal of the lease. A
peer that must wait is given a place in a queue, and is admitted when it returns at that time. A
place that comes too early costs as much as a registration, so the queue moves as fast as admitted
peers are served.
"""

from typing import Final

BURST_S: Final = 0.5  # a peer whose place is this near is admitted at once
EARLY_S: Final = 0.5  # how long before its time a place may be used
PLACES_MAX: Final = 20_000  # places remembered
UNSERVED_MAX: Final = 48  # peers admitted and not served yet
UNSERVED_TIMEOUT_S: Final = 10.0  # after which an admitted peer counts as gone
FULL_WAIT_S: Final = 1.0  # the least wait when UNSERVED_MAX peers are admitted
STEP_MAX_S: Final = 0.25  # the longest step between two places
SMOOTHING: Final = 0.05  # the weight of one served peer in the step


class ConnectionAdmission:
    """A queue of places, with a limit on peers that were admitted and are not served yet.

    The caller passes the time to each method.
    """

    def __init__(self, per_s: float) -> None:
        self._step_s = self._step_min_s = 1.0 / per_s
        self._next = float("-inf")
        self._places: dict[str, float] = {}
        self._unserved: dict[str, float] = {}
        self._served_at = float("-inf")

    def wait_s(self, name: str, now: float) -> float:
        """Return 0 if peer `name` is admitted now, else the seconds that it should wait.

        An admitted peer counts against UNSERVED_MAX until `served`, or for UNSERVED_TIMEOUT_S.
        """
        place = self._places.get(name)
        if place is None:
            place = self.take_place(now)
            if place > now + BURST_S:
                return self._remember(name, place) - now
        elif place > now + EARLY_S:
            return place - now
        else:
            del self._places[name]
        if self._is_full(now):
            return self._remember(name, self.take_place(now + FULL_WAIT_S)) - now
        self._unserved[name] = now
        return 0.0

    def served(self, name: str, now: float) -> None:
        """Note that an admitted peer was served or is gone, and adapt the step to that pace."""
        was_full = len(self._unserved) >= UNSERVED_MAX
        if self._unserved.pop(name, None) is None:
            return
        since_s, self._served_at = now - self._served_at, now
        observed_s = min(since_s, STEP_MAX_S) if was_full else self._step_min_s
        self._step_s += SMOOTHING * (max(observed_s, self._step_min_s) - self._step_s)

    def take_place(self, not_before: float) -> float:
        """Return the time of the next free place, and take it."""
        place = max(self._next, not_before)
        self._next = place + self._step_s
        return place

    def _is_full(self, now: float) -> bool:
        if len(self._unserved) >= UNSERVED_MAX:
            gone = [
                name for name, since in self._unserved.items() if now - since > UNSERVED_TIMEOUT_S
            ]
            for name in gone:
                del self._unserved[name]
        return len(self._unserved) >= UNSERVED_MAX

    def _remember(self, name: str, place: float) -> float:
        if len(self._places) >= PLACES_MAX:
            # Peers that never return must not keep their places for ever.
            self._places.clear()
        self._places[name] = place
        return place
