"""Seats forced elsewhere, to see what follows: the way out of a plan that no one exchange betters.

A seat is moved to a site whether or not that pays it, whoever is in its way leaves, and all are
filled and exchanged anew; a large model may leave a PoP to its neighbours only so. What comes of it
is kept if the whole is better.
"""

from typing import Final

import numpy as np

from scheduler.decide.attempt import ENOUGH, Effort, Saved
from scheduler.decide.exchange import Exchange
from scheduler.decide.search import Blocked, Search
from scheduler.decide.wish import Seated

FOLLOWING: Final = 3
"""How many exchanges may follow a seat that was forced elsewhere."""


class Shift:
    """Forced moves of what this plan would start; placements that stand are left alone."""

    def __init__(self, search: Search, exchange: Exchange, effort: Effort) -> None:
        self._search = search
        self._exchange = exchange
        self._effort = effort

    def run(self) -> bool:
        """Try the largest first, one seat a site, at each other site; stop at what is better."""
        for number in sorted(
            range(len(self._search.wishes)), key=lambda n: -self._search.wishes[n].memory_bytes
        ):
            wish = self._search.wishes[number]
            new = {s.site: s for s in wish.seats if s.seat and not s.waits}
            for seated in new.values():
                for site in np.flatnonzero(wish.rooms > 0):
                    if site == seated.site:
                        continue
                    if not self._effort.spend(10):
                        return False
                    if self._force(number, seated, int(site)):
                        return True
        return False

    def _force(self, number: int, seated: Seated, site: int) -> bool:
        search = self._search
        saved = Saved(search)
        for touched in range(len(search.wishes)):
            saved.touch(touched)
        before = saved.cost_before()
        search.untake(search.wishes[number], seated)
        if self._seat(number, site):
            search.blocked.clear()
            search.fill()
            if self._exchange.run(standing=False, most=FOLLOWING):
                search.fill()
            if saved.cost_now() < before - ENOUGH:
                return True
        saved.undo()
        return False

    def _seat(self, number: int, site: int) -> bool:
        """Seat a wish at a site, in the place of those that lose least where it is full."""
        search, wish = self._search, self._search.wishes[number]
        worth = search.worth_to(wish, site)
        if worth.offered is None:
            wanted = Blocked(wish=number, site=site, net=np.inf)
            ways = self._exchange.cheapest(wanted, self._exchange.holders(standing=False))
            for other, leaving in ways[0] if ways else []:
                search.untake(search.wishes[other], leaving)
            worth = search.worth_to(wish, site)
        if worth.offered is not None:
            search.take(wish, worth)
        return worth.offered is not None
