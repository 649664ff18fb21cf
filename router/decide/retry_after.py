"""When whoever finds no room should come back: by how fast the full lane has emptied so far."""

import math
from typing import Final

from router.decide.affinity import hash64

RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0
RETRY_AFTER_UNKNOWN_S: Final = 2.0
RETRY_SPREAD: Final = 0.5
RETRY_SPREAD_MIN_S: Final = 2.0
"""Those refused together are told times from the least on to this share later, or this much."""

DRAIN_MEMORY_S: Final = 30.0
STARTS_MIN: Final = 4
"""What came together ends together: the first ends after a full house tell little of a rate."""


def spread_retry_after_s(after_s: float, request_id: str) -> float:
    """Return when one of those refused together should come back: in `after_s` at the earliest."""
    range_s = max(RETRY_SPREAD_MIN_S, RETRY_SPREAD * after_s)
    return after_s + range_s * hash64(request_id) / 2**64


class DrainRate:
    """How fast a full lane is emptied, in tokens a second of the time in which it was full."""

    def __init__(self) -> None:
        self._full_since_s: float | None = None
        self._begun = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def full(self, now_s: float) -> None:
        """Note that there is no room: from here on, what begins is what drained."""
        if self._full_since_s is None:
            self._full_since_s = now_s

    def began(self, tokens: int, now_s: float, is_still_full: bool) -> None:
        """Note that a request got room. In a lane that is not full it tells nothing of capacity."""
        if self._full_since_s is None:
            return
        elapsed_s = max(0.0, now_s - self._full_since_s)
        kept = math.exp(-elapsed_s / DRAIN_MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed_s
        self._begun += 1
        self._full_since_s = now_s if is_still_full else None

    def wait_s(self, tokens: int, now_s: float) -> float:
        """Return how long `tokens` take to drain: an estimate, within what a client can use."""
        since_s = now_s if self._full_since_s is None else self._full_since_s
        stuck_s = max(0.0, now_s - since_s)
        if self._begun < STARTS_MIN:
            wait_s = max(RETRY_AFTER_UNKNOWN_S, stuck_s)
        else:
            wait_s = tokens * (self._seconds + stuck_s) / self._tokens
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s))
