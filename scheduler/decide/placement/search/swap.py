"""Takes slots from replicas that are worth less there than the replica that needs the slot.

Rule: a running replica is preempted only when it has settled, enough other replicas of its
deployment are warm, and the replica that takes its slot is worth more by the cost of starting the
preempted one again. The running replica ends now; its slot is taken once it has ended.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import numpy as np

from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.blocked_gains import BlockedGain
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import (
    IMPROVEMENT_MIN,
    Gain,
    PlacementDraft,
    Savepoint,
)
from scheduler.decide.placement.search.effort import EffortBudget
from scheduler.decide.placement.search.eviction import (
    Holders,
    cheapest_evictions,
    may_preempt_together,
    net_loss,
    new_holders,
    preemptable_holders,
)
from scheduler.decide.placement.search.greedy_fill import fill

SITES_TRIED_MAX: Final = 8
"""How many full sites are tried for a deployment at its maximum, the most promising first."""

CHAIN_MAX: Final = 2
"""How many times a displaced replica may displace another."""

SWAPS_AMONG_NEW_MAX: Final = 3
"""At how many sites new replicas are swapped after an exchange or a forced move."""

DISPLACED_SITES_MAX: Final = 4
"""At how many sites a displaced replica looks for others that it could displace."""


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A running replica that is to end for another that wants its slot."""

    replica: PlannedReplica
    reason: str


class _SwapResult(NamedTuple):
    """The cost that a swap saves, and the gain that was taken; None if it failed."""

    lowered: float
    gain: Gain | None


class SlotSwap:
    """Swaps on one draft. `settle_s` is how old a running replica must be to be preempted."""

    def __init__(self, draft: PlacementDraft, settle_s: float, effort: EffortBudget) -> None:
        self._draft = draft
        self._settle_s = settle_s
        self._effort = effort
        self._preemptions: list[Preemption] = []

    def preemptions(self) -> list[Preemption]:
        """Return the running replicas to end.

        Leaves out those whose deployment has no warm replica and waits for one that is starting.
        """
        return [
            preemption
            for preemption in self._preemptions
            if (state := preemption.replica.state).warm_pops() or not state.has_replica_coming()
        ]

    def run(self) -> bool:
        """Swap at full sites, the largest gain first; running replicas may be preempted.

        Return whether anything was swapped.
        """
        return self._run(partial(preemptable_holders, self._draft, self._settle_s), None)

    def run_among_new(self) -> bool:
        """Swap at a few full sites as `run` does, but leave running replicas where they are."""
        return self._run(partial(new_holders, self._draft), SWAPS_AMONG_NEW_MAX)

    def _run(self, read_holders: Callable[[], Holders], limit: int | None) -> bool:
        swapped = False
        holders = read_holders()
        for blocked in islice(self.blocked_gains(self._draft.states), limit):
            if not self._effort.spend(5):
                break
            if self.swap_in(blocked, holders):
                swapped = True
                holders = read_holders()
        self._draft.blocked.clear()
        return swapped

    def blocked_gains(self, states: Sequence[DeploymentState]) -> Iterator[BlockedGain]:
        """Return the gains of some deployments that found no free slot, largest first.

        Empties the draft's `blocked`.
        """
        draft = self._draft
        better = [gain for state in states for gain in self._better_sites(state)]
        return draft.blocked.drain(states, better, draft.net_without_slot)

    def _better_sites(self, state: DeploymentState) -> list[BlockedGain]:
        """Return where a deployment at its maximum would rather have its least useful new replica,
        by upper bounds of the gain."""
        moved = self._least_useful_new(state)
        if moved is None:
            return []
        draft, needs = self._draft, state.needs
        assignment, others = state.assignment.copy(), state.pops()
        assignment.remove_capacity(moved.site, moved.capacity)
        others.remove(moved.pop)
        cost_kept = state.cost()
        cost_without = cost_kept + net_loss(moved)
        sites = needs.sites.numbers
        saves = np.zeros(len(sites))
        if len(needs.cities):
            capacity = needs.site_capacity[sites]
            saves = assignment.gain_upper_bounds(needs.sites.latency_ms, capacity)
        unmet = needs.requirement_cost(others)
        met = [
            unmet - needs.requirement_cost([*others, draft.fleet.sites[int(site)].pop])
            for site in sites
        ]
        costs = cost_without - saves - np.array(met) + needs.hold_cost + START
        return [
            BlockedGain(state=state, site=int(sites[i]), net=float(cost_kept - costs[i]))
            for i in np.argsort(costs, kind="stable")[:SITES_TRIED_MAX]
            if costs[i] < cost_kept - IMPROVEMENT_MIN and sites[i] != moved.site
        ]

    def _least_useful_new(self, state: DeploymentState) -> PlannedReplica | None:
        """Return the new replica that a deployment at its maximum gives up for one elsewhere."""
        if not state.is_full:
            return None
        return min(state.new_replicas(), key=net_loss, default=None)

    def swap_in(self, blocked: BlockedGain, holders: Holders) -> bool:
        """Place a blocked replica where it lowers the cost most; return whether it did.

        If memory at its site is being released anyway, it waits for that instead.
        """
        draft, state = self._draft, blocked.state
        given_up = self._least_useful_new(state)
        own = [given_up] if given_up else []
        if not own and state.is_full:
            return False
        if not own:
            soon = draft.free_gain_at(state, blocked.site, count_releasing=True)
            if soon:
                if soon.net > IMPROVEMENT_MIN:
                    draft.take_when_released(state, soon)
                return False
        best, chosen = 0.0, None
        for leaving in cheapest_evictions(self._draft, blocked, holders):
            if not may_preempt_together(leaving):
                continue
            savepoint = draft.savepoint()
            lowered = self._try_swap(savepoint, blocked, [*own, *leaving]).lowered
            savepoint.roll_back()
            if lowered > best:
                best, chosen = lowered, [*own, *leaving]
        if chosen is None:
            return False
        gain = self._try_swap(draft.savepoint(), blocked, chosen).gain
        if gain:
            self._preempt(blocked, gain, [replica for replica in chosen if replica.placement])
        return True

    def _try_swap(
        self, savepoint: Savepoint, blocked: BlockedGain, leaving: Sequence[PlannedReplica]
    ) -> _SwapResult:
        """Place a blocked replica in the slots of `leaving`, and say by how much that is better."""
        running = sum(1 for replica in leaving if replica.placement)
        gain = self._place([savepoint], blocked, leaving)
        if not gain:
            return _SwapResult(0.0, None)
        # A preemption on an estimate that was too high must not have to be reverted soon.
        margin = IMPROVEMENT_MIN + 2 * START * running
        return _SwapResult(savepoint.lowered() - margin, gain)

    def _place(
        self,
        savepoints: Sequence[Savepoint],
        blocked: BlockedGain,
        leaving: Sequence[PlannedReplica],
    ) -> Gain | None:
        """Place a blocked replica; displaced new replicas find other slots or displace others."""
        draft, state = self._draft, blocked.state
        touched = in_order([state, *(replica.state for replica in leaving)])
        for savepoint in savepoints:
            for each in touched:
                savepoint.include(each)
        for replica in leaving:
            draft.remove(replica)
        waits = any(replica.placement for replica in leaving)
        gain = draft.free_gain_at(state, blocked.site, count_releasing=waits)
        if gain is None or gain.net <= IMPROVEMENT_MIN or state.is_full:
            return None
        if waits:
            draft.take_when_released(state, gain)
        else:
            draft.take(state, gain)
        if any(replica.slot for replica in leaving):
            draft.blocked.clear()
            fill(draft, only=touched)
            if len(savepoints) <= CHAIN_MAX:
                displaced = self.blocked_gains([each for each in touched if each is not state])
                for gain_of_displaced in islice(displaced, DISPLACED_SITES_MAX):
                    if self._displace_next(savepoints, gain_of_displaced, state):
                        break
        return gain

    def _displace_next(
        self, savepoints: Sequence[Savepoint], displaced: BlockedGain, displaced_by: DeploymentState
    ) -> bool:
        """Let a displaced replica displace another, of any deployment but the one that displaced
        it, if that lowers the cost. Return whether there was any that could leave."""
        holders = {
            node_id: [replica for replica in replicas if replica.state is not displaced_by]
            for node_id, replicas in new_holders(self._draft).items()
        }
        own = self._least_useful_new(displaced.state)
        evictions = cheapest_evictions(self._draft, displaced, holders)
        for leaving in evictions:
            inner = self._draft.savepoint()
            gain = self._place([*savepoints, inner], displaced, [own, *leaving] if own else leaving)
            if gain and inner.has_improved():
                return True
            inner.roll_back()
        return bool(evictions)

    def _preempt(self, blocked: BlockedGain, gain: Gain, running: Sequence[PlannedReplica]) -> None:
        pop = self._draft.fleet.sites[blocked.site].pop
        reason = (
            f"its slot in {pop} would save {gain.net:.0f} ms of waiting per second more for "
            f"{blocked.state.deployment_id}, which has no free slot there"
        )
        self._preemptions += [Preemption(replica=replica, reason=reason) for replica in running]


def in_order(states: Iterable[DeploymentState]) -> list[DeploymentState]:
    """Return states without repetition, in the order of the draft."""
    return sorted(set(states), key=lambda state: state.number)
