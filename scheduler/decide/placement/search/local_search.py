"""What makes a filled plan better: what does not pay goes, what pays more elsewhere moves, what
wants a full place gets it where its holders are worth less, and at last sites are filled anew and
seats are forced elsewhere to see what follows.

Rule: each is tried, the sum over the wishes it touched compared, and it is kept or undone.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from isochrone.wire.report import ReplicaState
from scheduler.decide.placement.retire import least_missed, may_go
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.greedy_search import FillOrder, Gain, GreedySearch
from scheduler.decide.placement.search.load_assignment import EPSILON
from scheduler.decide.placement.search.perturb import Perturbation
from scheduler.decide.placement.search.savepoint import ENOUGH, EffortBudget, Savepoint
from scheduler.decide.placement.search.swap import Preemption, SlotSwap

TRIED_PER_SEAT: Final = 4
"""How many other sites one seat is tried at, the most promising first."""

PRUNED_MAX: Final = 4
"""How often a plan is pruned and filled again before exchanges are tried."""


class LocalSearch:
    """Exchanges on top of one search. `settle_s` is how long a placement is left in its place."""

    def __init__(self, search: GreedySearch, settle_s: float, effort: int) -> None:
        self._search = search
        self._effort = EffortBudget(effort)
        self._settle_s = settle_s
        self._exchange = SlotSwap(search, settle_s, self._effort)
        self._shift = Perturbation(search, self._exchange, self._move, self._effort)

    def yielding(self) -> list[Preemption]:
        """Return the standing placements that are to end."""
        return self._exchange.yielding()

    def fill(self) -> None:
        """Fill. An empty fleet seats those first that need several devices of a node at once.

        So they find nodes that are whole, and the rest fits in between. Only where that leaves
        room for all: under scarcity what saves most for its bytes goes first, whatever its size.
        """
        search = self._search
        counts = {wish.deployment.engine.devices for wish in search.wishes} - {1}
        if not counts or any(wish.seats for wish in search.wishes):
            search.fill()
            return
        saved = Savepoint(search, search.wishes)
        for count in sorted(counts, reverse=True):
            large = [wish for wish in search.wishes if wish.deployment.engine.devices >= count]
            search.fill(only=large)
            self._move_new_seats()
        search.fill()
        is_scarce = any(wish.flow.unserved() > EPSILON for wish in search.wishes)
        if is_scarce or not search.has_starts_left:
            saved.undo()
            search.blocked.clear()
            search.fill()

    def run(self) -> None:
        """Exchange and fill in turn until nothing is better or the effort is spent."""
        for _ in range(PRUNED_MAX):
            if not self._drop_what_does_not_pay():
                break
            self._search.fill()
        while self._effort.left > 0:
            moved = self._move_new_seats()
            moved |= self._exchange.run()
            if not (moved or self._rebuild_all() or self._shift.run()):
                return
            self._search.fill()

    def _rebuild_all(self) -> bool:
        """Empty each site, then each wish, of what is new, and fill again in another order."""
        wishes = self._search.wishes
        moved = False
        sites = sorted({seated.site for wish in wishes for seated in wish.new_seats()})
        parts: list[tuple[Sequence[DeploymentState], list[int]]] = [
            (wishes, [site]) for site in sites
        ]
        parts += [([wish], sites) for wish in wishes]
        for some, at in parts:
            for order in FillOrder:
                if not self._effort.spend(10):
                    return moved
                new = [seated for wish in some for seated in wish.new_seats()]
                moved |= self._rebuild([seated for seated in new if seated.site in at], order)
        return moved

    def _rebuild(self, leaving: Sequence[PlannedReplica], order: FillOrder) -> bool:
        search = self._search
        saved = Savepoint(search, search.wishes)
        before = saved.cost_before()
        for seated in leaving:
            search.untake(seated)
        search.fill(order)
        if saved.cost_now() < before - ENOUGH:
            return True
        saved.undo()
        return False

    def _drop_what_does_not_pay(self) -> bool:
        """Take back new seats that later ones have made spare: greedy never looks back."""
        dropped = False
        for wish in self._search.wishes:
            if len(wish.seats) <= wish.least or not any(s.seat for s in wish.seats):
                continue
            for seated in wish.new_seats():
                paid = seated.hold + seated.start
                if wish.loss_at_least(seated) < paid and wish.loss(seated) < paid - ENOUGH:
                    self._search.untake(seated)
                    dropped = True
        return dropped

    def _move_new_seats(self) -> bool:
        """Try each new seat elsewhere, the largest first."""
        moved = False
        for wish in self._search.largest_first():
            for seated in wish.new_seats():
                if not self._effort.spend(1):
                    return moved
                moved |= self._move(seated)
        return moved

    def _move(self, seated: PlannedReplica) -> bool:
        """Take one new seat away, and keep that or the best other place for it, if it is better."""
        saved = Savepoint(self._search, [seated.wish])
        before = saved.cost_before()
        self._search.untake(seated)
        self._refill(seated.wish, seated.site)
        if saved.cost_now() < before - ENOUGH:
            return True
        saved.undo()
        return False

    def relocate(self) -> None:
        """Where all the seats a policy allows are taken, start one elsewhere that is worth more.

        What it takes the place of ends as one too many when it is warm. The new one must save what
        it costs and twice START more, as in an exchange. What is left must have settled first, but
        for a PoP to be kept warm that has none.
        """
        search = self._search
        for wish in search.wishes:
            if not search.has_starts_left:
                return
            if len(wish.seats) != wish.most or not all(_is_settled(s) for s in wish.seats):
                continue
            cold = wish.kept_pops_without()
            missed = least_missed(wish, may_go(wish, 0.0 if cold else self._settle_s))
            if missed is None or not self._effort.spend(1):
                continue
            leaving = missed[1]
            saved = Savepoint(search, [wish])
            before = saved.cost_before()
            search.untake(leaving)
            reason = "" if cold else f"worth more here than in {leaving.pop}"
            self._refill(wish, leaving.site, reason)
            is_due = wish.kept_pops_without() < cold or bool(
                leaving.placement and leaving.placement.age_s >= self._settle_s
            )
            if is_due and saved.cost_now() < before - ENOUGH - 2 * START:
                search.occupy(leaving)
                wish.add(leaving)
            else:
                saved.undo()

    def _refill(self, wish: DeploymentState, but: int, reason: str = "") -> None:
        """Take the best seat that pays for one wish, if any, at another site than `but`."""
        search = self._search
        sites = np.flatnonzero(wish.rooms > 0)
        sites = sites[sites != but]
        if not len(sites) or len(wish.seats) >= wish.most:
            return
        guesses = np.zeros(len(sites))
        if len(wish.cities):
            guesses = wish.flow.bounds(sites, wish.rooms[sites])
        if not wish.lacks_nothing():
            guesses += [wish.need(search.ground.sites[int(s)].pop).worth for s in sites]
        order = np.argsort(-guesses, kind="stable")[:TRIED_PER_SEAT]
        best: Gain | None = None
        for site in sites[order]:
            worth = search.worth(wish, int(site))
            if worth and worth.net > ENOUGH and (best is None or worth.net > best.net):
                best = worth
        if best:
            search.take(wish, best, reason=reason)


def _is_settled(seated: PlannedReplica) -> bool:
    """Say whether a seat is a warm placement of the version that is wished for."""
    placement = seated.placement
    return (
        placement is not None
        and placement.state is ReplicaState.WARM
        and placement.version == seated.wish.deployment.version
    )
