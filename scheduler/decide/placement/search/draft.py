"""The draft: all state that changes while a plan is sought, and savepoints to return to."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.blocked_gains import BlockedGains
from scheduler.decide.placement.search.deployment_state import (
    DeploymentState,
    Need,
    PlannedReplica,
)
from scheduler.decide.placement.search.load_assignment import EPSILON, LoadAssignment
from scheduler.decide.placement.search.slot_ledger import Candidate, SlotLedger

IMPROVEMENT_MIN: Final = 1e-6
"""A change must lower the cost by more than this to be kept: less may be rounding."""


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """The value of one more replica at a site.

    `saves` is the latency it saves, `net` all that it gains less its costs. Without a `candidate`
    the site has no free slot, or none was looked for.
    """

    need: Need
    saves: float
    net: float
    site: int
    candidate: Candidate | None


class PlacementDraft:
    """Deployment states, the slots they take, and the blocked gains found.

    `starts_max` limits the replicas that the plan may start.
    """

    def __init__(
        self,
        fleet: FleetCapacity,
        ledger: SlotLedger,
        states: Sequence[DeploymentState],
        starts_max: int,
    ) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.states = states
        self.blocked = BlockedGains()
        self._starts_left = starts_max
        self._site_pops = [site.pop for site in fleet.sites]
        for number, state in enumerate(states):
            state.number = number

    @property
    def has_starts_left(self) -> bool:
        """Say whether the plan may start another replica."""
        return self._starts_left > 0

    @property
    def exceeds_starts(self) -> bool:
        """Say whether the draft starts more replicas than the plan may."""
        return self._starts_left < 0

    def limit_starts(self, starts_max: int) -> None:
        """Change how many replicas the plan may start, those that it would start now included."""
        starting = sum(1 for state in self.states for replica in state.replicas if replica.slot)
        self._starts_left = starts_max - starting

    def largest_first(self) -> list[DeploymentState]:
        """Return all states by memory, largest first: they fit in the fewest places."""
        return sorted(self.states, key=lambda state: -state.needs.memory_bytes)

    def has_free_devices(self, state: DeploymentState) -> NDArray[np.bool_]:
        """Say for each site whether a replica of a deployment may find devices that are free.

        False means that there is no slot. If true, a slot may still be refused for another reason.
        """
        needs = state.needs
        largest_free = self.ledger.largest_free(needs.deployment.engine.devices_per_node)
        is_free: NDArray[np.bool_] = (largest_free >= needs.device_bytes) & (
            needs.site_capacity > 0
        )
        return is_free

    def has_free_devices_at(self, state: DeploymentState, site: int) -> bool:
        """Return the same as `has_free_devices`, for one site that could take a replica."""
        needs = state.needs
        largest_free = self.ledger.largest_free(needs.deployment.engine.devices_per_node)
        return bool(largest_free[site] >= needs.device_bytes)

    def lacks_devices(self, state: DeploymentState) -> bool:
        """Say whether a deployment has unserved load, and no free devices for a replica."""
        if state.is_full or state.assignment.unserved() <= EPSILON:
            return False
        return not self.has_free_devices(state).any()

    def need_at(self, state: DeploymentState, site: int) -> Need:
        """Return what one more replica at a site is worth besides latency."""
        return state.need_at(site)

    def gain_at(self, state: DeploymentState, site: int) -> Gain:
        """Return what one more replica at a site gains, whether or not that pays its costs."""
        return self._gain(state, site, False, -inf)

    def free_gain_at(
        self,
        state: DeploymentState,
        site: int,
        count_releasing: bool = False,
        start_discount: float = 0.0,
    ) -> Gain | None:
        """Return what one more replica at a site gains, or None if it has no free slot.

        A replica that would pay but has no slot is noted in `blocked`. With `count_releasing`,
        memory of replicas that are ending counts as free, and nothing is noted. With a
        `start_discount` a slot is looked for, too, if the replica would pay with that.
        """
        gain = self._gain(state, site, count_releasing, START - start_discount)
        if gain.candidate is not None:
            return gain
        if gain.net > START and not count_releasing:
            self.blocked.note(state, site, gain.net - START)
        return None

    def net_without_slot(self, state: DeploymentState, site: int) -> float:
        """Return what one more replica at a site gains, if it finds a slot with the weights at
        hand."""
        worth = self.need_at(state, site).worth
        return state.saves_at(site) + worth - state.needs.hold_cost - START

    def take(self, state: DeploymentState, gain: Gain, reason: str = "") -> None:
        """Add a replica that this plan would start."""
        self.add(self._planned(state, gain, reason, waits=False))

    def take_when_released(self, state: DeploymentState, gain: Gain) -> None:
        """Add a replica that would start once the replica in its slot has ended."""
        self.add(self._planned(state, gain, "", waits=True))

    def remove(self, replica: PlannedReplica) -> None:
        """Remove a replica that this plan would have started, or mark a running one to end."""
        self.release_slot(replica)
        replica.state.remove(replica)

    def add(self, replica: PlannedReplica) -> None:
        """Add a replica that is new, or was removed."""
        self.take_slot(replica)
        replica.state.add(replica)

    def take_slot(self, replica: PlannedReplica) -> None:
        """Take the slot of a replica; of a running one, stop releasing it."""
        if replica.slot:
            needs = replica.state.needs
            self.ledger.take(replica.slot, needs.deployment, needs.model)
            self._starts_left -= 1
        elif replica.placement:
            self.ledger.cancel_releasing(replica.placement)

    def release_slot(self, replica: PlannedReplica) -> None:
        """Release the slot of a replica: at once, or when it has ended if it is running."""
        if replica.slot:
            needs = replica.state.needs
            self.ledger.give_back(replica.slot, needs.deployment, needs.model)
            self._starts_left += 1
        elif replica.placement:
            self.ledger.start_releasing(replica.placement)

    def savepoint(self, states: Iterable[DeploymentState] = ()) -> "Savepoint":
        """Return a savepoint of some states; more can be included before they are changed."""
        return Savepoint(self, states)

    def _gain(
        self, state: DeploymentState, site: int, count_releasing: bool, net_min: float
    ) -> Gain:
        needs = state.needs
        need = self.need_at(state, site)
        saves = state.saves_at(site)
        net = saves + need.worth - needs.hold_cost
        # Below START it would not pay even where the weights are at hand: do not look for a slot.
        candidate = None
        if net > net_min:
            candidate = self.ledger.best_candidate(
                site, needs.eligible_nodes[site], needs, count_releasing
            )
        net -= candidate.start_cost if candidate else 0.0
        return Gain(need=need, saves=saves, net=net, site=site, candidate=candidate)

    def _planned(
        self, state: DeploymentState, gain: Gain, reason: str, *, waits: bool
    ) -> PlannedReplica:
        """Return the replica that a gain's candidate would become, with the reason for it."""
        candidate = gain.candidate
        assert candidate is not None
        pop = self._site_pops[gain.site]
        saves = f"saves {gain.saves / state.needs.weight:.0f} ms of waiting per second in {pop}"
        if not reason and gain.need.tier >= 2:
            reason = gain.need.reason
        elif not reason and gain.need.worth > gain.saves and gain.need.reason:
            reason = f"{gain.need.reason}; {saves}"
        return PlannedReplica(
            state=state,
            pop=pop,
            site=gain.site,
            capacity=float(state.needs.site_capacity[gain.site]),
            hold_cost=state.needs.hold_cost,
            slot=candidate.slot,
            start_cost=candidate.start_cost,
            reason=reason or f"demand: {saves}",
            waits=waits,
        )


class SavedState(NamedTuple):
    """The replicas and the assignment of a state, and its version when they were remembered."""

    version: int
    replicas: list[PlannedReplica]
    assignment: LoadAssignment


class Savepoint:
    """Remembers states of a draft, to compare costs with and to return to.

    A change that spans several deployments is kept or rolled back as a whole. States that have not
    changed cost nothing to compare or to return to: of a thousand, most have not.
    """

    def __init__(self, draft: PlacementDraft, states: Iterable[DeploymentState]) -> None:
        self._draft = draft
        self._saved: dict[DeploymentState, SavedState] = {}
        for state in states:
            self.include(state)

    def include(self, state: DeploymentState) -> None:
        """Remember a state as it is now, unless it is remembered already."""
        if state not in self._saved:
            self._saved[state] = SavedState(state.version, list(state.replicas), state.assignment)

    def lowered(self) -> float:
        """Return by how much the cost of the remembered states is lower than it was."""
        return sum(_cost(state, saved) - state.cost() for state, saved in self._changed())

    def has_improved(self) -> bool:
        """Return whether the cost is lower than it was, by more than rounding."""
        return self.lowered() > IMPROVEMENT_MIN

    def keep_if_improved(self) -> bool:
        """Return whether the cost is lower than it was; roll back if not."""
        if self.has_improved():
            return True
        self.roll_back()
        return False

    def roll_back(self) -> None:
        """Restore every remembered state."""
        for state, saved in list(self._changed()):
            before, now = set(map(id, saved.replicas)), set(map(id, state.replicas))
            for replica in [r for r in state.replicas if id(r) not in before]:
                self._draft.release_slot(replica)
            for replica in [r for r in saved.replicas if id(r) not in now]:
                self._draft.take_slot(replica)
            state.restore(list(saved.replicas), saved.assignment)

    def _changed(self) -> Iterator[tuple[DeploymentState, SavedState]]:
        return (item for item in self._saved.items() if item[0].version != item[1].version)


def _cost(state: DeploymentState, saved: SavedState) -> float:
    replica_costs = sum(replica.hold_cost + replica.start_cost for replica in saved.replicas)
    pops = [replica.pop for replica in saved.replicas]
    replica_costs += state.ratio_cost(saved.replicas)
    return saved.assignment.cost() + state.needs.requirement_cost(pops) + replica_costs
