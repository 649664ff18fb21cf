"""Improves a filled draft: drops, moves, swaps, recombines, rebuilds and perturbs new replicas.

Rule: each change is tried on the draft; if the cost of the deployments it touched is not lower, it
is rolled back.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import IMPROVEMENT_MIN, Gain, PlacementDraft
from scheduler.decide.placement.search.effort import EffortBudget
from scheduler.decide.placement.search.exchange import Exchange
from scheduler.decide.placement.search.greedy_fill import FillOrder, fill
from scheduler.decide.placement.search.load_assignment import EPSILON
from scheduler.decide.placement.search.perturb import Perturbation
from scheduler.decide.placement.search.recombine import Recombination
from scheduler.decide.placement.search.removal import (
    cheapest_removal,
    removable_replicas,
    separate_replica,
)
from scheduler.decide.placement.search.swap import SlotSwap

SITES_TRIED_MAX: Final = 4
"""How many other sites are tried for one replica, the most promising first."""

LAID_OUT_S: Final = 3600.0
"""A deployment is new until one of its replicas is this old. A plan starts 8 replicas or 1 % of the
fleet's, so that many plans lay out an empty large fleet."""

PRUNES_MAX: Final = 4
"""How many times a plan is pruned and filled again before other changes are tried."""


class LocalSearch:
    """Fills and improves one draft. `settle_s` is how old a running replica must be to move."""

    def __init__(self, draft: PlacementDraft, settle_s: float, effort: int) -> None:
        self._draft = draft
        self._effort = EffortBudget(effort)
        self._settle_s = settle_s
        self.swap = SlotSwap(draft, settle_s, self._effort)
        self._perturbation = Perturbation(draft, self.swap, self._move, self._effort)
        self.exchange = Exchange(draft, self.swap, self._move, self._effort)
        self.recombination = Recombination(draft, self._effort)

    def fill(self) -> None:
        """Fill the draft. In an empty fleet, place first what needs several devices of a node.

        So large replicas find nodes that are still empty, and small ones fit in between. If not all
        load can be served that way, fill again by savings per byte, whatever the size.
        """
        draft = self._draft
        counts = {state.needs.deployment.engine.devices for state in draft.states} - {1}
        if not counts or any(state.replicas for state in draft.states):
            fill(draft)
            return
        savepoint = draft.savepoint(draft.states)
        for count in sorted(counts, reverse=True):
            large = [s for s in draft.states if s.needs.deployment.engine.devices >= count]
            fill(draft, only=large)
            self._move_new_replicas()
            if any(draft.lacks_devices(state) for state in large):
                break
        else:
            fill(draft)
        is_scarce = any(state.assignment.unserved() > EPSILON for state in draft.states)
        if is_scarce or not draft.has_starts_left:
            savepoint.roll_back()
            draft.blocked.clear()
            fill(draft)

    def run(self) -> None:
        """Improve the draft until no change lowers the cost or the effort is spent.

        Recombination comes before the changes that try one thing after another: it gets
        close to the best result at once. It runs again after them, because they find other changes.
        """
        for _ in range(PRUNES_MAX):
            if not self._drop_unprofitable():
                break
            fill(self._draft)
        has_recombined = False
        while not self._effort.is_spent:
            changed = self._move_new_replicas()
            changed |= self.swap.run()
            if not changed and not has_recombined:
                has_recombined, changed = True, self.recombination.run()
            changed = changed or self._rebuild_all() or self._perturbation.run()
            if not (changed or self.exchange.run() or self.recombination.run()):
                return
            fill(self._draft)

    def run_thoroughly(self, effort: int) -> None:
        """Improve the draft with `effort` more attempts if it starts several replicas.

        Replicas that start together are laid out together, because later they would have to move.
        """
        if sum(len(state.new_replicas()) for state in self._draft.states) > 1:
            self._effort.add(effort)
            self.recombination.run()
            self.run()

    def lay_out(self) -> None:
        """Start also replicas of new deployments that save their hold cost but not START.

        START keeps replicas from moving back and forth with demand. A new deployment starts its
        replicas anyway, and demand that grows would start most of these later.
        """
        new = [state for state in self._draft.states if _is_new(state)]
        if new:
            fill(self._draft, only=new, start_discount=START)

    def relocate_running(self) -> None:
        """For deployments at their maximum, start a replica elsewhere if it is worth more there.

        The running one ends as surplus when the new one is warm. The new one must save its costs
        and twice START more, as in a swap. Replicas must have settled first, except where a
        keep_warm PoP has none. One that may not end as surplus stays: the new one would end.
        """
        draft = self._draft
        for state in draft.states:
            needs = state.needs
            if not draft.has_starts_left:
                return
            if len(state.replicas) != needs.replicas_max:
                continue
            if not all(_is_warm_and_current(replica) for replica in state.replicas):
                continue
            cold = state.cold_keep_warm_pops()
            settled = removable_replicas(state, 0.0 if cold else self._settle_s)
            kept = separate_replica(draft.fleet, state)
            removable = [replica for replica in settled if replica is not kept]
            removal = cheapest_removal(state, removable, draft.ledger)
            if removal is None or not self._effort.spend(1):
                continue
            leaving = removal.replica
            savepoint = draft.savepoint([state])
            draft.remove(leaving)
            self._place_elsewhere(
                state, leaving.site, "" if cold else f"worth more here than in {leaving.pop}"
            )
            is_due = state.cold_keep_warm_pops() < cold or bool(
                leaving.placement and leaving.placement.age_s >= self._settle_s
            )
            if is_due and savepoint.lowered() > IMPROVEMENT_MIN + 2 * START:
                draft.add(leaving)
            else:
                savepoint.roll_back()

    def _rebuild_all(self) -> bool:
        """Empty each site, then each deployment, of new replicas, and fill in another order."""
        states = self._draft.states
        changed = False
        sites = sorted({replica.site for state in states for replica in state.new_replicas()})
        parts: list[tuple[Sequence[DeploymentState], list[int]]] = [
            (states, [site]) for site in sites
        ]
        parts += [([state], sites) for state in states]
        for some_states, some_sites in parts:
            for order in FillOrder:
                new = [replica for state in some_states for replica in state.new_replicas()]
                leaving = [replica for replica in new if replica.site in some_sites]
                # Without new replicas, filling the draft again would change nothing.
                if not leaving:
                    break
                if not self._effort.spend(10):
                    return changed
                changed |= self._rebuild(leaving, order)
        return changed

    def _rebuild(self, leaving: Sequence[PlannedReplica], order: FillOrder) -> bool:
        draft = self._draft
        savepoint = draft.savepoint(draft.states)
        for replica in leaving:
            draft.remove(replica)
        fill(draft, order)
        return savepoint.keep_if_improved()

    def _drop_unprofitable(self) -> bool:
        """Remove new replicas that later ones have made superfluous."""
        dropped = False
        for state in self._draft.states:
            is_minimal = len(state.replicas) <= state.needs.replicas_min
            if is_minimal or not any(replica.slot for replica in state.replicas):
                continue
            for replica in state.new_replicas():
                paid = replica.hold_cost + replica.start_cost
                if state.loss_lower_bound(replica) < paid and (
                    state.loss(replica) < paid - IMPROVEMENT_MIN
                ):
                    self._draft.remove(replica)
                    dropped = True
        return dropped

    def _move_new_replicas(self) -> bool:
        """Try each new replica elsewhere, the largest first."""
        moved = False
        for state in self._draft.largest_first():
            for replica in state.new_replicas():
                if not self._effort.spend(1):
                    return moved
                moved |= self._move(replica)
        return moved

    def _move(self, replica: PlannedReplica) -> bool:
        """Remove one new replica, and place one at the best other site, if that is better."""
        savepoint = self._draft.savepoint([replica.state])
        self._draft.remove(replica)
        self._place_elsewhere(replica.state, replica.site)
        return savepoint.keep_if_improved()

    def _place_elsewhere(self, state: DeploymentState, left_site: int, reason: str = "") -> None:
        """Take the best free slot that pays at any site but `left_site`, if there is one."""
        draft, needs = self._draft, state.needs
        if state.is_full:
            return
        sites = needs.sites.numbers[needs.sites.numbers != left_site]
        worths, costs = state.needs_by_site().worths, needs.hold_cost + START
        # A replica that saves no more than this does not pay at any site.
        least = max(0.0, costs - float(worths.max(initial=0.0)))
        bounds = state.gain_upper_bounds(least)[sites] + worths[sites]
        best: Gain | None = None
        for place in np.argsort(-bounds, kind="stable")[:SITES_TRIED_MAX]:
            if bounds[place] <= costs:
                break
            gain = draft.free_gain_at(state, int(sites[place]))
            if gain and gain.net > IMPROVEMENT_MIN and (best is None or gain.net > best.net):
                best = gain
        if best:
            draft.take(state, best, reason=reason)


def _is_new(state: DeploymentState) -> bool:
    """Say whether a deployment is still being laid out: no replica is LAID_OUT_S old."""
    ages = (replica.placement.age_s for replica in state.replicas if replica.placement)
    return max(ages, default=0.0) < LAID_OUT_S


def _is_warm_and_current(replica: PlannedReplica) -> bool:
    """Say whether a replica is running, warm, and of the deployment's current version."""
    placement = replica.placement
    return (
        placement is not None
        and placement.state is ReplicaState.WARM
        and placement.version == replica.state.needs.deployment.version
    )
