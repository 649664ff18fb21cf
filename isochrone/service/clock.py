"""The wall clock, for what must agree with other machines: certificates and retention."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import monotonic


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


class JumpFreeClock:
    """The wall clock without its jumps ahead since this object was made.

    Used to delete old data: it may be late, and is not early because a clock was set forward.
    """

    def __init__(
        self,
        wall: Callable[[], datetime] = utc_now,
        steady: Callable[[], float] = monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._began = wall()
        self._began_steady = steady()

    def now(self) -> datetime:
        """Return the wall clock's time, or what it would be by the monotonic clock if earlier."""
        elapsed = timedelta(seconds=self._steady() - self._began_steady)
        return min(self._wall(), self._began + elapsed)
