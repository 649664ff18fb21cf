"""When a replica that broke is tried again, and when it is given up."""

from collections.abc import Sequence
from typing import Final

FIRST_S: Final = 0.5
MOST_S: Final = 60.0
WINDOW_S: Final = 600.0
BREAKS_MAX: Final = 6


def retry_delay_s(breaks: Sequence[float], now: float, chance: float) -> float | None:
    """Return how long to wait, or None where it broke too often lately and is given up.

    `breaks` are the times it broke, `chance` a number in [0, 1): engines that broke together are
    not all started together.
    """
    recent = sum(now - at < WINDOW_S for at in breaks)
    if recent >= BREAKS_MAX:
        return None
    longest = min(MOST_S, FIRST_S * 2.0 ** max(0, recent - 1))
    return longest * (0.5 + chance / 2)
