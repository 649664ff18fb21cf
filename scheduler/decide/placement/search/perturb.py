"""Seats forced elsewhere, to see what follows: the way out of a plan that no one exchange betters.

A seat is moved to a site whether or not that pays it, whoever is in its way leaves, its fellows
move to where they are better off, and all are filled and exchanged anew; a large model may leave a
PoP to its neighbours only so. What comes of it is kept if the whole is better.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.greedy_search import BlockedGain, GreedySearch
from scheduler.decide.placement.search.savepoint import ENOUGH, EffortBudget, Savepoint, in_order
from scheduler.decide.placement.search.swap import SlotSwap

FOLLOWING: Final = 3
"""How many exchanges may follow a seat that was forced elsewhere."""

EJECTED_TRIED: Final = 6
"""How many places are tried for those whom it ejected."""


class Perturbation:
    """Forced moves of what this plan would start; placements that stand are left alone."""

    def __init__(
        self,
        search: GreedySearch,
        exchange: SlotSwap,
        move: Callable[[PlannedReplica], bool],
        effort: EffortBudget,
    ) -> None:
        self._search = search
        self._exchange = exchange
        self._move = move
        self._effort = effort

    def run(self) -> bool:
        """Try the largest first, one seat a site, at each other site; stop at what is better."""
        for wish in self._search.largest_first():
            new = {seated.site: seated for seated in wish.new_seats()}
            for seated in new.values():
                for site in np.flatnonzero(wish.rooms > 0):
                    if site == seated.site:
                        continue
                    if not self._effort.spend(10):
                        return False
                    if self._force(seated, int(site)):
                        return True
        return False

    def _force(self, seated: PlannedReplica, site: int) -> bool:
        search, wish = self._search, seated.wish
        saved = Savepoint(search, search.wishes)
        before = saved.cost_before()
        search.untake(seated)
        ejected = self._seat(wish, site)
        if ejected is not None:
            for other in wish.new_seats():
                if other.site != site:
                    self._move(other)
            search.blocked.clear()
            search.fill()
            if self._eject_on(ejected, saved, before):
                return True
            if self._exchange.run(standing=False, most=FOLLOWING):
                search.fill()
            if saved.cost_now() < before - ENOUGH:
                return True
        saved.undo()
        return False

    def _eject_on(
        self, ejected: Sequence[DeploymentState], saved: Savepoint, before: float
    ) -> bool:
        """Let who was ejected eject others, each place apart: the first that pays may bar the best.

        An ejection chain: who is ejected now may push on in its turn (`exchange.py`).
        """
        search = self._search
        for entry in self._exchange.wanted(ejected)[:EJECTED_TRIED] if ejected else []:
            if not self._effort.spend(5):
                return False
            inner = Savepoint(search, search.wishes)
            if self._exchange.give(entry, self._exchange.holders(standing=False)):
                search.fill()
                if saved.cost_now() < before - ENOUGH:
                    return True
            inner.undo()
        return False

    def _seat(self, wish: DeploymentState, site: int) -> list[DeploymentState] | None:
        """Seat a wish at a site, where it is full in the place of those that lose least.

        Return the wishes of those; None where it cannot be seated.
        """
        search = self._search
        ejected: list[DeploymentState] = []
        worth = search.worth_to(wish, site)
        if worth.offered is None:
            wanted = BlockedGain(wish=wish, site=site, net=np.inf)
            ways = self._exchange.cheapest(wanted, self._exchange.holders(standing=False))
            leaving = ways[0] if ways else []
            for seated in leaving:
                search.untake(seated)
            ejected = in_order(seated.wish for seated in leaving)
            worth = search.worth_to(wish, site)
        if worth.offered is None:
            return None
        search.take(wish, worth)
        return ejected
