"""Computes Retry-After for a refused request from the rate at which the full lane has drained."""

import math
from typing import Final

from router.decide.caches.affinity import hash64

RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0
RETRY_AFTER_UNKNOWN_S: Final = 2.0
RETRY_SPREAD: Final = 0.5
RETRY_SPREAD_MIN_S: Final = 2.0
"""Requests refused together get times spread over this share of the wait, or at least this long,
so that they do not all come back at once."""

DRAIN_MEMORY_S: Final = 30.0
"""Time constant of the averages."""

STARTS_MIN: Final = 4
"""Fewer starts than this say little about the rate: requests that came together end together."""


def spread_retry_after_s(after_s: float, request_id: str) -> float:
    """Return the time after which a request should come back: `after_s` plus a spread by its id."""
    range_s = max(RETRY_SPREAD_MIN_S, RETRY_SPREAD * after_s)
    return after_s + range_s * hash64(request_id) / 2**64


class DrainRate:
    """How fast a lane drains, in tokens per second of the time in which it is full."""

    def __init__(self) -> None:
        self._full_since_s: float | None = None
        self._starts = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def record_full(self, now_s: float) -> None:
        """Note that a request found no capacity: the requests that start from now on have
        drained."""
        if self._full_since_s is None:
            self._full_since_s = now_s

    def record_start(self, tokens: int, now_s: float, is_still_full: bool) -> None:
        """Note that a request got capacity; in a lane that is not full this says nothing."""
        if self._full_since_s is None:
            return
        elapsed_s = max(0.0, now_s - self._full_since_s)
        kept = math.exp(-elapsed_s / DRAIN_MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed_s
        self._starts += 1
        self._full_since_s = now_s if is_still_full else None

    def wait_s(self, tokens: int, now_s: float) -> float:
        """Estimate how long `tokens` take to drain, within the bounds of Retry-After."""
        since_s = now_s if self._full_since_s is None else self._full_since_s
        stuck_s = max(0.0, now_s - since_s)
        if self._starts < STARTS_MIN:
            wait_s = max(RETRY_AFTER_UNKNOWN_S, stuck_s)
        else:
            wait_s = tokens * (self._seconds + stuck_s) / self._tokens
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s))
