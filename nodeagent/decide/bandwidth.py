"""Limits on transfer rates: a maximum for our own traffic and a minimum for that of a sender.

No function here reads a clock: each takes the time and returns how long to wait.
"""

from typing import Final, NamedTuple

BURST_S: Final = 1.0
"""Seconds of unused rate that may be sent at once."""


class BandwidthLimit:
    """A ceiling on bytes per second shared by all transfers of one direction. 0 is no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._booked_until_s = float("-inf")

    def wait_s(self, size_bytes: int, now: float) -> float:
        """Book `size_bytes` and return how long to wait before the next transfer."""
        if self.bytes_per_s <= 0:
            return 0.0
        start_s = max(self._booked_until_s, now - BURST_S)
        self._booked_until_s = start_s + size_bytes / self.bytes_per_s
        return max(0.0, self._booked_until_s - now)


class MinimumRate(NamedTuple):
    """The lowest rate accepted from a sender, measured over consecutive windows."""

    bytes_per_s: float
    window_s: float


class SlowSenderDetector:
    """Detects a sender that falls below a minimum rate.

    Time that the receiver itself waited is subtracted (`excused_s`).
    """

    def __init__(self, minimum: MinimumRate, now: float) -> None:
        self._minimum = minimum
        self._window_start_s = now
        self._window_bytes = 0

    def is_slow(self, size_bytes: int, now: float, excused_s: float = 0.0) -> bool:
        """Count received bytes; return True when a window ends below the minimum rate."""
        self._window_bytes += size_bytes
        self._window_start_s += excused_s
        elapsed_s = now - self._window_start_s
        if elapsed_s < self._minimum.window_s:
            return False
        is_slow = self._window_bytes < self._minimum.bytes_per_s * elapsed_s
        self._window_start_s, self._window_bytes = now, 0
        return is_slow
