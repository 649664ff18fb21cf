"""How fast bytes may go: a bound on the rate, with a second's worth let through at once.

Rule: this file knows no clock. It is told the time and answers how long to wait.
"""

from typing import NamedTuple

BURST_S = 1.0


class BandwidthLimit:
    """One direction's bandwidth, shared by all who go that way. A rate of 0 is no bound."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._paid_until = float("-inf")

    def wait_s(self, size_bytes: int, now: float) -> float:
        """Book `size_bytes` and return how long to wait before the next are sent or read."""
        if self.bytes_per_s <= 0:
            return 0.0
        begin = max(self._paid_until, now - BURST_S)
        self._paid_until = begin + size_bytes / self.bytes_per_s
        return max(0.0, self._paid_until - now)


class MinimumRate(NamedTuple):
    """The least that a sender must send, looked at a window at a time."""

    least_bytes_per_s: float
    window_s: float


class SlowSenderDetector:
    """Whether a sender keeps up its pace.

    Time spent waiting for our own pace is not the sender's fault and is given with `excused_s`.
    """

    def __init__(self, pace: MinimumRate, now: float) -> None:
        self._pace = pace
        self._began = now
        self._bytes = 0

    def is_slow(self, size_bytes: int, now: float, excused_s: float = 0.0) -> bool:
        """Count what came, and say whether a window ended with less than the least."""
        self._bytes += size_bytes
        self._began += excused_s
        elapsed = now - self._began
        if elapsed < self._pace.window_s:
            return False
        is_slow = self._bytes < self._pace.least_bytes_per_s * elapsed
        self._began, self._bytes = now, 0
        return is_slow
