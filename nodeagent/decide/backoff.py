"""Decides when a broken replica is restarted, and when it is given up."""

from collections.abc import Sequence
from typing import Final

DELAY_FIRST_S: Final = 0.5
DELAY_MAX_S: Final = 60.0
WINDOW_S: Final = 600.0
"""Only failures within this time count."""

FAILURES_MAX: Final = 6
"""A replica with this many failures in the window is given up."""


def retry_delay_s(failure_times: Sequence[float], now: float, jitter: float) -> float | None:
    """Return the delay before the next restart, or None if the replica is given up.

    The delay doubles with each failure in the window. `jitter`, in [0, 1), spreads the restarts of
    engines that failed together.
    """
    failures = sum(now - failed_at < WINDOW_S for failed_at in failure_times)
    if failures >= FAILURES_MAX:
        return None
    delay_s = min(DELAY_MAX_S, DELAY_FIRST_S * 2.0 ** max(0, failures - 1))
    return delay_s * (0.5 + jitter / 2)
