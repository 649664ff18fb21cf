"""Recombination: all new replicas of a small fleet are laid out again at once.

A chain of moves through several sites may lower the cost only when it is complete, and each move of
it alone may raise it by more than any other change wins. Here the deployments' layouts
(`layouts.py`) are chosen together (`layout_choice.py`). The result is placed on the draft and kept
if the cost is lower there, with load queues.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from scheduler.decide.arrays import Floats
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.draft import PlacementDraft, Savepoint
from scheduler.decide.placement.search.effort import EffortBudget
from scheduler.decide.placement.search.layout_choice import Combination, LayoutChoice
from scheduler.decide.placement.search.layouts import DeploymentLayouts, Layout, LayoutSite
from scheduler.decide.placement.search.packing import NodeMemory, ReplicaSize, SitePacking

EFFORT_MIN: Final = 1_000
"""With fewer attempts left a recombination does not begin. Plans that start one replica have fewer
from the start."""

PAIRS_MAX: Final = 200
"""With more (deployment, site) pairs there are too many layouts to look at."""

CITY_PAIRS_MAX: Final = 150
DEVICES_MAX: Final = 128
"""With more (city, site) pairs or devices each layout takes too long to look at."""

LAID_OUT_PER_DEVICE_MAX: Final = 8
"""The most new replicas for each device that are laid out together. Without a limit, ten thousand
replicas of a deployment that claims one byte would fit on a device, but not their processes."""

TRIED_MAX: Final = 3
"""How many combinations are tried on the draft, the cheapest first."""


def is_small(draft: PlacementDraft) -> bool:
    """Say whether the replicas of a fleet can be recombined within seconds."""
    fleet = draft.fleet
    sites = len(fleet.sites)
    return (
        len(draft.states) * sites <= PAIRS_MAX
        and len(fleet.pops) * sites <= CITY_PAIRS_MAX
        and len(draft.ledger.free) <= DEVICES_MAX
    )


class Recombination:
    """Lays out the replicas that this plan would start again. Running replicas stay."""

    def __init__(self, draft: PlacementDraft, effort: EffortBudget) -> None:
        self._draft = draft
        self._effort = effort
        self._seen: list[int] = []

    def run(self) -> bool:
        """Return whether another combination of layouts lowers the cost, and then keep it."""
        if self._effort.left < EFFORT_MIN:
            return False
        draft = self._draft
        states = [state for state in draft.largest_first() if _is_free(state)]
        pairs = len(states) * len(draft.fleet.sites)
        # A plan that has not changed since is not recombined again.
        versions = [state.version for state in states]
        if len(states) < 2 or pairs > PAIRS_MAX or versions == self._seen:
            return False
        savepoint = draft.savepoint(states)
        leaving = [replica for state in states for replica in state.new_replicas()]
        for replica in leaving:
            draft.remove(replica)
        free = _FreeCapacity(draft, states)
        before = free.layouts_of([(replica.state, replica.site) for replica in leaving])
        cost = sum(each.cost(layout) for each, layout in zip(free.layouts, before, strict=True))
        choice = LayoutChoice(free.layouts, free.packings, cost, self._effort.left)
        combinations = choice.run()
        self._effort.spend(choice.attempts)
        lowered = any(self._try(free, each, savepoint) for each in combinations[:TRIED_MAX])
        if not lowered:
            savepoint.roll_back()
        draft.blocked.clear()
        self._seen = [state.version for state in states]
        return lowered

    def _try(self, free: "_FreeCapacity", combination: Combination, before: Savepoint) -> bool:
        """Place a combination. Return whether the cost is lower than before; roll back if not."""
        empty = self._draft.savepoint(self._draft.states)
        for as_packed in (False, True):
            if free.place(combination, as_packed) and before.has_improved():
                return True
            empty.roll_back()
        return False


class _FreeCapacity:
    """The free capacity of a fleet that some deployments share: `layouts` of each of them, and
    `packings` of each site."""

    def __init__(self, draft: PlacementDraft, states: Sequence[DeploymentState]) -> None:
        self._draft = draft
        self._states = states
        self._sites = sorted({site for state in states for site in state.needs.eligible_nodes})
        self._sizes = [_size_of(state) for state in states]
        self.packings = [self._packing(site) for site in self._sites]
        self.layouts = [self._layouts(number) for number in range(len(states))]

    def layouts_of(self, places: Sequence[tuple[DeploymentState, int]]) -> list[Layout]:
        """Return the layout of each deployment that has replicas at these sites."""
        return [
            tuple(places.count((state, site)) for site in self._sites) for state in self._states
        ]

    def place(self, combination: Combination, as_packed: bool) -> bool:
        """Place the replicas of a combination; return whether all found a slot.

        Each takes the best slot of its site, on the node with fewest replicas of its deployment for
        example; or, `as_packed`, the devices that are known to leave enough memory for all others.
        """
        draft = self._draft
        placed = [
            (site, packed)
            for number, (site, packing) in enumerate(zip(self._sites, self.packings, strict=True))
            for packed in packing.pack(tuple(layout[number] for layout in combination.layouts))
            or ()
        ]
        # Models that load fastest go first, so that load queues are shortest.
        placed.sort(key=lambda item: self._states[item[1].deployment].needs.model.weights_bytes)
        for site, packed in placed:
            state = self._states[packed.deployment]
            needs = state.needs
            gain = draft.gain_at(state, site)
            if as_packed:
                candidate = draft.ledger.candidate_on(packed.node, packed.device_ids, needs)
                gain = msgspec.structs.replace(gain, candidate=candidate)
            if gain.candidate is None or not draft.has_starts_left:
                return False
            draft.take(state, gain)
        return True

    def _packing(self, site: int) -> SitePacking:
        draft = self._draft
        nodes = []
        for node_id in draft.fleet.sites[site].nodes:
            keys = draft.fleet.table.healthy_devices[site, node_id]
            device_ids = tuple(device_id for _, device_id in keys)
            free_bytes = tuple(draft.ledger.free_for(key, 1.0) for key in keys)
            nodes.append(NodeMemory(draft.fleet.nodes[node_id], device_ids, free_bytes))
        eligible = []
        for state in self._states:
            found = {node.node_id for node in state.needs.eligible_nodes.get(site, ())}
            eligible.append(
                frozenset(number for number, node in enumerate(nodes) if node.node.node_id in found)
            )
        return SitePacking(nodes, self._sizes, eligible)

    def _layouts(self, number: int) -> DeploymentLayouts:
        draft, state = self._draft, self._states[number]
        needs = state.needs
        sites = []
        for site, packing in zip(self._sites, self.packings, strict=True):
            candidate = None
            if needs.site_capacity[site] > 0:
                candidate = draft.ledger.best_candidate(site, needs.eligible_nodes[site], needs)
            laid_out = LAID_OUT_PER_DEVICE_MAX * packing.devices_above(0)
            most = packing.most(number, min(needs.replicas_max, laid_out)) if candidate else 0
            start_cost = candidate.start_cost if candidate else 0.0
            sites.append(LayoutSite(site, draft.fleet.sites[site].pop, most, start_cost))
        return DeploymentLayouts(state, sites, self._use(self._sizes[number]))

    def _use(self, size: ReplicaSize) -> Floats:
        """Return the share of each site's memory that a replica takes, and of its devices if it
        takes more than half of one."""
        memory, devices = np.zeros(len(self.packings)), np.zeros(len(self.packings))
        for number, packing in enumerate(self.packings):
            memory[number] = size.devices * size.memory_bytes / max(1, packing.free_bytes)
            half = packing.device_bytes // 2
            if size.memory_bytes > half:
                devices[number] = size.devices / max(1, packing.devices_above(half))
        return np.stack([memory, devices])


def _is_free(state: DeploymentState) -> bool:
    """Say whether the new replicas of a deployment can be laid out by themselves: each on one node,
    with memory of its own, in no ratio to others."""
    needs = state.needs
    return (
        bool(needs.eligible_nodes)
        and needs.deployment.engine.nodes == 1
        and needs.deployment.policy.overcommit <= 1
        and not needs.has_roles
    )


def _size_of(state: DeploymentState) -> ReplicaSize:
    devices = state.needs.deployment.engine.devices
    return ReplicaSize(devices, state.needs.device_bytes)
