"""Limits how often each peer may do something rare that costs the whole fleet."""

from typing import Final

ROUNDING_S: Final = 1e-6

NAMES_MAX: Final = 1000
"""With more names than this, those that may do it as often as any other are forgotten."""


class PeerLimit:
    """A token bucket for each peer, kept as a time. The caller passes the time."""

    def __init__(self, burst: int, every_s: float) -> None:
        """Allow each peer `burst` times at once, and one more every `every_s` seconds."""
        self._burst_s = burst * every_s
        self._every_s = every_s
        self._until: dict[str, float] = {}

    def take(self, name: str, now: float) -> bool:
        """Count one time; return False, and count nothing, if that is too often."""
        until = max(self._until.get(name, now), now) + self._every_s
        if until - now > self._burst_s + ROUNDING_S:
            return False
        self._until[name] = until
        if len(self._until) > NAMES_MAX:
            self._until = {peer: at for peer, at in self._until.items() if at > now}
        return True
