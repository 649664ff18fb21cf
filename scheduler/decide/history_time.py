"""The time that has certainly passed, even if a wall clock is wrong: history is deleted by it.

A scheduler that starts cannot tell a clock that is a year ahead from a year without schedulers. So
only the time that schedulers have seen passing counts, and a little more, to make up for the time
in which none ran. A clock that is late costs disk space; one that is early would lose history.
"""

from typing import Final

CATCH_UP_SHARE: Final = 1 / 24
"""History that is behind the wall clocks advances faster than time by this share: an hour a day."""

BEHIND_S: Final = 3600.0
"""History that is further behind the wall clocks is worth a line in the log."""


def advance(at_s: float, elapsed_s: float, wall_s: float) -> float:
    """Return the Unix time to which history has advanced from `at_s`, `elapsed_s` later.

    The result does not exceed `wall_s`, the earlier of the wall clocks, and is at least `at_s`.
    """
    ahead_s = at_s + max(0.0, elapsed_s) * (1 + CATCH_UP_SHARE)
    return max(at_s, min(wall_s, ahead_s))
