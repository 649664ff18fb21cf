"""Finds peers whose clocks are wrong, by the messages that say when they were sent.

A clock that is a day behind makes its machine refuse the certificates of peers that have just
joined. A message may also be late. If all messages of some time show the same difference, the clock
is wrong.
"""

from math import isfinite
from typing import Final

WRONG_S: Final = 60.0
"""A clock that is off by more is wrong, long before certificates seem not to be valid yet."""

SUSTAINED_S: Final = 20.0
"""How long all messages must show the difference: messages that waited while a process hung arrive
together."""


class PeerClock:
    """One peer's clock, compared with the scheduler's."""

    __slots__ = ("_behind_s", "_is_known", "_wrong_since")

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._wrong_since: float | None = None
        self._is_known = False

    @property
    def behind_s(self) -> float:
        """How far the clock is behind, negative if ahead; 0 unless it is known to be wrong."""
        return self._behind_s if self._is_known else 0.0

    def record(self, sent_at: float, received_at: float, now: float) -> bool:
        """Note a message; return True when the clock becomes known to be wrong.

        `sent_at` is Unix time by the peer's clock, 0 if its version does not say; `received_at` is
        Unix time by the scheduler's, and `now` monotonic seconds.
        """
        if sent_at == 0.0 or not isfinite(sent_at):
            return False
        self._behind_s = received_at - sent_at
        if abs(self._behind_s) <= WRONG_S:
            self._wrong_since, self._is_known = None, False
            return False
        if self._wrong_since is None:
            self._wrong_since = now
        was_known = self._is_known
        self._is_known = now - self._wrong_since >= SUSTAINED_S
        return self._is_known and not was_known


def clock_problem(peer: str, behind_s: float) -> str:
    """Return in words what is wrong with the clock of `peer`; empty if nothing is."""
    if not behind_s:
        return ""
    direction = "behind" if behind_s > 0 else "ahead of"
    return (
        f"{peer}: its clock is {abs(behind_s):.0f} s {direction} the acting scheduler's:"
        " synchronise both (NTP)"
    )
