"""Lets the routers whose requests a replica refuses have a share of it.

A router sends its next request when one of its own has ended. So the routers that fill a replica
would take every place that becomes free, and others, which ask now and then
(`router/decide/replicas/full_replicas.py`), would hardly ever find one.

Rule: a router leaves one place to each router that was refused within WAITING_S and has fewer
requests here; but not more than `left_max` in all.
"""

from collections import Counter
from typing import Final

WAITING_S: Final = 0.6
"""Longer than a router waits before it asks again, with a round trip to the other side of the
world."""


class RouterShares:
    """How many requests each router has at a replica, and which routers wait for a place."""

    def __init__(self, left_max: int) -> None:
        """Leave at most `left_max` places to routers that wait."""
        self._left_max = left_max
        self._requests: Counter[str] = Counter()
        self._refused_at_s: dict[str, float] = {}

    def record_begin(self, router: str) -> None:
        """Note that a router's request got a place."""
        self._requests[router] += 1
        self._refused_at_s.pop(router, None)

    def record_end(self, router: str) -> None:
        """Note that a router's request gave its place back."""
        self._requests[router] -= 1
        if not self._requests[router]:
            del self._requests[router]

    def record_refusal(self, router: str, now_s: float) -> None:
        """Note that a router's request got no place."""
        self._refused_at_s[router] = now_s

    def places_left(self, router: str, now_s: float, *, to_all: bool = False) -> int:
        """Return how many places a router's next request leaves to other routers.

        With `to_all`, to all that wait.
        """
        self._refused_at_s = {
            name: at_s for name, at_s in self._refused_at_s.items() if now_s - at_s <= WAITING_S
        }
        own = self._requests[router]
        waiting = sum(
            name != router and (to_all or self._requests[name] < own) for name in self._refused_at_s
        )
        return min(waiting, self._left_max)
