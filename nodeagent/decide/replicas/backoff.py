"""Decides when a broken replica is restarted, and when it is given up."""

from collections.abc import Sequence
from typing import Final

DELAY_FIRST_S: Final = 0.5
DELAY_MAX_S: Final = 60.0
WINDOW_S: Final = 600.0
"""Failures of an engine that was warm in between count for this time only."""

FAILURES_MAX: Final = 6
"""A replica with this many failures in the window is given up, and so is one with this many failed
starts in a row, however long each takes: one that never becomes ready takes `load_timeout_s`."""


def retry_delay_s(
    failure_times: Sequence[float], now: float, jitter: float, failed_starts: int
) -> float | None:
    """Return the delay before the next restart, or None if the replica is given up.

    The delay doubles with each failure that counts. `jitter`, in [0, 1), spreads the restarts of
    engines that failed together. `failed_starts` counts failures since the replica was last warm.
    """
    recent = sum(now - failed_at < WINDOW_S for failed_at in failure_times)
    failures = max(recent, failed_starts)
    if failures >= FAILURES_MAX:
        return None
    delay_s = min(DELAY_MAX_S, DELAY_FIRST_S * 2.0 ** max(0, failures - 1))
    return delay_s * (0.5 + jitter / 2)
