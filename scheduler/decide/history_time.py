"""Up to when time has passed for sure, whatever the wall clocks say: history is deleted by it.

A scheduler that starts cannot tell a clock that is a year ahead from a year without schedulers. So
only the time that schedulers have seen passing counts, and a little more, to make up for the time
in which none ran. Being late costs disk space; being early would cost history.
"""

from datetime import datetime, timedelta
from typing import Final

CATCH_UP_SHARE: Final = 1 / 24
"""How much faster than time history advances while it is behind the wall clocks: an hour a day."""

BEHIND_S: Final = 3600.0
"""History that is further behind the wall clocks is worth a line in the log."""


def advance(at: datetime, elapsed_s: float, wall: datetime) -> datetime:
    """Return up to when history has advanced from `at`, `elapsed_s` later.

    It does not pass `wall`, the earlier of the wall clocks, and never goes back.
    """
    ahead = at + timedelta(seconds=max(0.0, elapsed_s) * (1 + CATCH_UP_SHARE))
    return max(at, min(wall, ahead))
