"""Perturbation: forces a replica elsewhere to leave a local minimum that no single swap improves.

A new replica is moved to another site whether or not that lowers the cost. Replicas in its way
leave, the other new replicas of its deployment move to better places, and the draft is filled and
swapped again. The result is kept if the total cost is lower. For example, this may be the only way
in which a large model leaves a PoP to its neighbours.

Or a new replica only has to leave: several replicas of others may be worth more there together, if
its deployment finds a slot elsewhere. No swap brings them in, because each alone is worth less. So
they take its devices before its deployment displaces others at other sites.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from scheduler.decide.placement.search.blocked_gains import BlockedGain
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import PlacementDraft, Savepoint
from scheduler.decide.placement.search.effort import EffortBudget
from scheduler.decide.placement.search.eviction import cheapest_evictions, new_holders
from scheduler.decide.placement.search.greedy_fill import fill
from scheduler.decide.placement.search.swap import SlotSwap, in_order

FORCED_OFF_EFFORT: Final = 30
"""The attempts that a replica forced off its site takes from the budget."""

DISPLACEMENTS_MAX: Final = 4
"""How many sites a deployment that was forced off one may take from others."""

EVICTED_SITES_MAX: Final = 6
"""How many sites are tried for the replicas that a forced move evicted."""


@dataclass(eq=False)
class Perturbation:
    """Forced moves of replicas that this plan would start. Running replicas stay.

    `move` tries another place for one new replica and returns whether it moved.
    """

    draft: PlacementDraft
    swap: SlotSwap
    move: Callable[[PlannedReplica], bool]
    effort: EffortBudget

    def run(self) -> bool:
        """Force replicas off their sites and to each other site, the largest first, one of each
        site; stop at the first change that lowers the cost, and return whether there was one.

        Deployment by deployment: either of the two may need the whole budget for all of them.
        """
        return any(
            self._force_off_sites(state) or self._force_elsewhere(state)
            for state in self.draft.largest_first()
        )

    def _force_elsewhere(self, state: DeploymentState) -> bool:
        for replica in state.new_per_site():
            for site in np.flatnonzero(state.needs.site_capacity > 0):
                if site == replica.site:
                    continue
                if not self.effort.spend(10):
                    return False
                if self._force_to(replica, int(site)):
                    return True
        return False

    def _force_off_sites(self, state: DeploymentState) -> bool:
        for replica in state.new_per_site():
            if not self.effort.spend(FORCED_OFF_EFFORT):
                return False
            if self._force_off(replica):
                return True
        return False

    def _force_off(self, replica: PlannedReplica) -> bool:
        """Take a replica off its site and give the others its devices, then let its deployment
        displace others at other sites. Return whether that lowers the cost; roll back if not."""
        draft, state, site = self.draft, replica.state, replica.site
        savepoint = draft.savepoint(draft.states)
        draft.remove(replica)
        others = [other for other in draft.states if other is not state]
        # Only a deployment at its maximum has to leave a site to come here.
        self._move_new(other for other in others if other.is_full)
        fill(draft, only=others)
        for _ in range(DISPLACEMENTS_MAX):
            draft.blocked.clear()
            fill(draft, only=[state])
            if not self._displace_elsewhere(state, site):
                break
        draft.blocked.clear()
        fill(draft)
        if not savepoint.has_improved():
            self._move_new(others)
            fill(draft)
        return savepoint.keep_if_improved()

    def _displace_elsewhere(self, state: DeploymentState, left_site: int) -> bool:
        """Let a deployment displace others at one site but `left_site`, if that lowers the cost."""
        for blocked in islice(self.swap.blocked_gains([state]), EVICTED_SITES_MAX):
            if blocked.site != left_site and self.swap.swap_in(blocked, new_holders(self.draft)):
                return True
        return False

    def _move_new(self, states: Iterable[DeploymentState]) -> None:
        for state in states:
            for replica in state.new_replicas():
                self.move(replica)

    def _force_to(self, replica: PlannedReplica, site: int) -> bool:
        draft, state = self.draft, replica.state
        savepoint = draft.savepoint(draft.states)
        draft.remove(replica)
        evicted = self._place_at(state, site)
        if evicted is None:
            savepoint.roll_back()
            return False
        for other in state.new_replicas():
            if other.site != site:
                self.move(other)
        draft.blocked.clear()
        fill(draft)
        if self._place_evicted(evicted, savepoint):
            return True
        if self.swap.run_among_new():
            fill(draft)
        return savepoint.keep_if_improved()

    def _place_evicted(self, evicted: Sequence[DeploymentState], savepoint: Savepoint) -> bool:
        """Let evicted replicas evict others, one site at a time: an ejection chain.

        The first site that lowers the cost of one deployment may bar the best for all, so each is
        tried from the same starting point. `swap.py` continues the chain.
        """
        draft = self.draft
        for blocked in islice(self.swap.blocked_gains(evicted), EVICTED_SITES_MAX):
            if not self.effort.spend(5):
                return False
            inner = draft.savepoint(draft.states)
            if self.swap.swap_in(blocked, new_holders(draft)):
                fill(draft)
                if savepoint.has_improved():
                    return True
            inner.roll_back()
        return False

    def _place_at(self, state: DeploymentState, site: int) -> list[DeploymentState] | None:
        """Place a replica at a site, evicting those that lose least if it is full.

        Return the deployments of the evicted replicas; None if no replica can be placed.
        """
        draft = self.draft
        evicted: list[DeploymentState] = []
        gain = draft.gain_at(state, site)
        if gain.candidate is None:
            blocked = BlockedGain(state=state, site=site, net=np.inf)
            evictions = cheapest_evictions(draft, blocked, new_holders(draft))
            leaving = evictions[0] if evictions else []
            for replica in leaving:
                draft.remove(replica)
            evicted = in_order(replica.state for replica in leaving)
            gain = draft.gain_at(state, site)
        if gain.candidate is None:
            return None
        draft.take(state, gain)
        return evicted
