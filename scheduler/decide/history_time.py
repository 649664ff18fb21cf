"""Up to when time has passed for sure, whatever the wall clocks say: history is deleted by it.

A scheduler that starts cannot tell a clock that is a year ahead from a year without schedulers. So
only the time that schedulers have seen passing counts, and a little more, to make up for the time
in which none ran. Being late costs disk space; being early would cost history.
"""

from typing import Final

CATCH_UP_SHARE: Final = 1 / 24
"""How much faster than time history advances while it is behind the wall clocks: an hour a day."""

BEHIND_S: Final = 3600.0
"""History that is further behind the wall clocks is worth a line in the log."""


def advance(at_s: float, elapsed_s: float, wall_s: float) -> float:
    """Return up to when (Unix time) history has advanced from `at_s`, `elapsed_s` later.

    It does not pass `wall_s`, the earlier of the wall clocks, and never goes back.
    """
    ahead_s = at_s + max(0.0, elapsed_s) * (1 + CATCH_UP_SHARE)
    return max(at_s, min(wall_s, ahead_s))
