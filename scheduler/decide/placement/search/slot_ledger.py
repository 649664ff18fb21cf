"""Books a draft's use of the fleet: device memory, rank ports, load queues, failure domains.

Slots are taken and given back many times while a plan is sought.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from heapq import nsmallest
from math import ceil
from operator import itemgetter
from typing import Final

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, DeviceId, NodeId, PopId
from isochrone.wire.models.model import CatalogModel, Deployment
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.start_times import queued_bytes
from scheduler.decide.cluster import ClusterState, FleetNode, Placement
from scheduler.decide.placement.fleet.device_sharing import DeviceSharing
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import (
    FreeMemory,
    Slot,
    SlotPart,
    awake_minimum,
    free_memory,
)
from scheduler.decide.placement.score import FAILED_HERE, start_cost
from scheduler.decide.placement.search.deployment_needs import DeploymentNeeds

CROWD_COST: Final = 2.0
"""Added to a node's start cost for each replica of the deployment in its failure domain, to spread
replicas over domains when start costs are close."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A free slot, how soon a replica on it would be warm, and what starting it costs."""

    slot: Slot
    start_s: float
    start_cost: float


class SlotLedger:
    """Books the slots of a draft plan. `free` is the memory left on each device in bytes."""

    def __init__(self, fleet: FleetCapacity, cluster: ClusterState) -> None:
        self._fleet = fleet
        self.free: dict[tuple[NodeId, DeviceId], int] = dict(
            free_memory(cluster.nodes, cluster.placements)
        )
        models = {model.model_id: model for model in cluster.models}
        self._queued_bytes = queued_bytes(
            cluster.placements,
            {
                d.deployment_id: models[d.model_id].weights_bytes
                for d in cluster.deployments
                if d.model_id in models
            },
        )
        self._awake_in_pop: dict[tuple[DeploymentId, PopId], int] = defaultdict(int)
        self._sharing = DeviceSharing(cluster)
        self._sharing_after_release = DeviceSharing(cluster)
        """The same without replicas that are ending."""
        self._releasing: dict[tuple[NodeId, DeviceId], int] = defaultdict(int)
        self._replicas_in_domain: dict[tuple[DeploymentId, str], int] = defaultdict(int)
        self._groups_led: dict[NodeId, int] = defaultdict(int)
        # A cached candidate is valid while the version of its site has not moved.
        self._site_versions = [0] * len(fleet.sites)
        self._candidates: dict[tuple[DeploymentId, int, bool], tuple[int, Candidate | None]] = {}
        self._fullest_first: dict[tuple[int, NodeId], list[tuple[int, DeviceId]]] = {}
        """The free bytes of a node's devices at a site, ascending; what has changed is left out."""
        self._largest_free: dict[int, Floats] = {}
        self._changed_sites: dict[int, set[int]] = {}
        for placement in cluster.placements:
            if placement.is_ending:
                self.start_releasing(placement)
            self._groups_led[placement.node_id] += placement.rank_port > 0
            for part in placement.parts:
                if part.node_id in fleet.nodes:
                    if part.overcommit <= 1 and not placement.is_ending:
                        pop = fleet.nodes[part.node_id].pop
                        self._awake_in_pop[part.deployment_id, pop] += 1
                    domain = fleet.failure_domain(part.node_id)
                    self._replicas_in_domain[part.deployment_id, domain] += 1

    def replicas_in_domain_of(self, node_id: NodeId, deployment_id: DeploymentId) -> int:
        """Return how many replicas of a deployment would fail together with a node."""
        return self._replicas_in_domain[deployment_id, self._fleet.failure_domain(node_id)]

    def free_for(
        self, key: tuple[NodeId, DeviceId], overcommit: float, count_releasing: bool = False
    ) -> int:
        """Return the bytes of a device that one more replica may take.

        Less than is free where over-committed replicas could not wake otherwise.
        """
        free = self.free[key] + (self._releasing[key] if count_releasing else 0)
        if not self._sharing.is_used:
            return free
        sharing = self._sharing_after_release if count_releasing else self._sharing
        return min(free, sharing.bytes_for(key, overcommit))

    def all_free_for(self, overcommit: float) -> FreeMemory:
        """Return the bytes of each device that one more replica may take."""
        if not self._sharing.is_used:
            return self.free
        return {key: self.free_for(key, overcommit) for key in self.free}

    def best_candidate(
        self,
        site: int,
        nodes: Sequence[FleetNode],
        needs: DeploymentNeeds,
        count_releasing: bool = False,
    ) -> Candidate | None:
        """Return the best free slot of a site on one of `nodes` for a replica, or None.

        The soonest start wins, then the failure domain with fewest replicas, then the tightest
        devices. With `count_releasing`, memory of replicas that are ending counts as free.
        """
        key = (needs.deployment_id, site, count_releasing)
        cached = self._candidates.get(key)
        if cached is None or cached[0] != self._site_versions[site]:
            found = self._find_candidate(site, nodes, needs, count_releasing)
            cached = self._candidates[key] = (self._site_versions[site], found)
        return cached[1]

    def candidate_on(
        self,
        node: FleetNode,
        device_ids: tuple[DeviceId, ...],
        needs: DeploymentNeeds,
    ) -> Candidate:
        """Return the slot on given devices of one node; they have the memory for it."""
        queued = self._queued_bytes[node.node_id]
        start_s = self._fleet.start_times.start_s(node, needs.model, queued)
        failures = self._fleet.start_history.failures_on(needs.deployment_id, node.node_id)
        return Candidate(
            slot=Slot(
                parts=(SlotPart(node=node, device_ids=device_ids),),
                memory_bytes=needs.awake_bytes,
                awake_bytes=needs.awake_bytes,
            ),
            start_s=start_s,
            start_cost=start_cost(start_s) + FAILED_HERE * failures,
        )

    def largest_free(self, count: int) -> Floats:
        """Return for each site the most bytes that `count` devices of one node all have free.

        A site with less than a replica needs has no slot; one with more need not have one.
        """
        if count not in self._largest_free:
            self._largest_free[count] = np.zeros(len(self._fleet.sites))
            self._changed_sites[count] = set(range(len(self._fleet.sites)))
        largest, changed = self._largest_free[count], self._changed_sites[count]
        for site in changed:
            largest[site] = self._largest_free_at(site, count)
        changed.clear()
        return largest

    def take(self, slot: Slot, deployment: Deployment, model: CatalogModel) -> None:
        """Take a slot for a replica that would start on it."""
        self._book(slot, deployment, 1)
        for part in slot.parts:
            self._queued_bytes[part.node.node_id] += model.weights_bytes

    def give_back(self, slot: Slot, deployment: Deployment, model: CatalogModel) -> None:
        """Give a slot back."""
        self._book(slot, deployment, -1)
        for part in slot.parts:
            self._queued_bytes[part.node.node_id] -= model.weights_bytes

    def start_releasing(self, placement: Placement) -> None:
        """Count the memory of a running replica as about to become free."""
        for part in placement.parts:
            self._invalidate(part.node_id)
            for device_id in part.device_ids:
                self._releasing[part.node_id, device_id] += part.memory_bytes
                self._sharing_after_release.book_part(part, device_id, -1)

    def cancel_releasing(self, placement: Placement) -> None:
        """Stop counting the memory of a running replica as about to become free."""
        for part in placement.parts:
            self._invalidate(part.node_id)
            for device_id in part.device_ids:
                self._releasing[part.node_id, device_id] -= part.memory_bytes
                self._sharing_after_release.book_part(part, device_id, 1)

    def _find_candidate(
        self,
        site: int,
        nodes: Sequence[FleetNode],
        needs: DeploymentNeeds,
        count_releasing: bool,
    ) -> Candidate | None:
        fleet, deployment, model = self._fleet, needs.deployment, needs.model
        engine, deployment_id = deployment.engine, deployment.deployment_id
        awake_bytes = needs.awake_bytes
        pop = fleet.sites[site].pop
        is_short = self._awake_in_pop[deployment_id, pop] < awake_minimum(deployment.policy, pop)
        overcommit = 1.0 if is_short else deployment.policy.overcommit
        needed = ceil(awake_bytes / overcommit)
        found: list[tuple[tuple[float, int, int, str], FleetNode, tuple[DeviceId, ...], float]] = []
        for node in nodes:
            by_free = self._by_free_bytes_for(site, node.node_id, overcommit, count_releasing)
            first, count = bisect_left(by_free, (needed,)), engine.devices_per_node
            devices = tuple(device_id for _, device_id in by_free[first : first + count])
            if len(devices) < count:
                continue
            start_s = fleet.start_times.start_s(node, model, self._queued_bytes[node.node_id])
            failures = fleet.start_history.failures_on(deployment_id, node.node_id)
            cost = start_cost(start_s) + FAILED_HERE * failures
            crowd = self.replicas_in_domain_of(node.node_id, deployment_id)
            memory_left = self.free[node.node_id, devices[0]] - needed
            order = (round(cost, 1) + CROWD_COST * crowd, crowd, memory_left, str(node.node_id))
            found.append((order, node, devices, start_s))
        chosen = nsmallest(engine.nodes, found, key=itemgetter(0))
        leader = self._choose_leader([node for _, node, _, _ in chosen]) if engine.nodes > 1 else 0
        if len(chosen) < engine.nodes or leader < 0:
            return None
        chosen.insert(0, chosen.pop(leader))
        parts = tuple(SlotPart(node=node, device_ids=devices) for _, node, devices, _ in chosen)
        # A replica over several nodes is warm when its slowest part is.
        start_s = max(start_s for _, _, _, start_s in chosen)
        failures_on = fleet.start_history.failures_on
        failures = max(failures_on(deployment_id, part.node.node_id) for part in parts)
        return Candidate(
            slot=Slot(
                parts=parts, memory_bytes=needed, awake_bytes=awake_bytes, overcommit=overcommit
            ),
            start_s=start_s,
            start_cost=start_cost(start_s) + FAILED_HERE * failures,
        )

    def _choose_leader(self, nodes: Sequence[FleetNode]) -> int:
        """Return the first node that has a rank port left, or -1."""
        for number, node in enumerate(nodes):
            first, last = node.rank_ports or (1, 0)
            if self._groups_led[node.node_id] <= last - first:
                return number
        return -1

    def _by_free_bytes_for(
        self, site: int, node_id: NodeId, overcommit: float, count_releasing: bool
    ) -> list[tuple[int, DeviceId]]:
        """Return the memory that a replica may take of each healthy device of a node at a site,
        ascending."""
        if not (count_releasing or self._sharing.is_used):
            return self._by_free_bytes(site, node_id)
        keys = self._fleet.table.healthy_devices[site, node_id]
        return sorted((self.free_for(key, overcommit, count_releasing), key[1]) for key in keys)

    def _by_free_bytes(self, site: int, node_id: NodeId) -> list[tuple[int, DeviceId]]:
        """Return the free bytes of each healthy device of a node at a site, ascending."""
        key = site, node_id
        if key not in self._fullest_first:
            keys = self._fleet.table.healthy_devices[key]
            self._fullest_first[key] = sorted((self.free[key], key[1]) for key in keys)
        return self._fullest_first[key]

    def _invalidate(self, node_id: NodeId) -> None:
        """Make the cached candidates of a node's sites stale."""
        for site in self._fleet.table.sites_of_node.get(node_id, ()):
            self._site_versions[site] += 1
            self._fullest_first.pop((site, node_id), None)
            for changed in self._changed_sites.values():
                changed.add(site)

    def _largest_free_at(self, site: int, count: int) -> int:
        nodes = self._fleet.sites[site].nodes
        by_node = [self._by_free_bytes(site, node_id) for node_id in nodes]
        return max((devices[-count][0] for devices in by_node if len(devices) >= count), default=0)

    def _book(self, slot: Slot, deployment: Deployment, replicas: int) -> None:
        """Add `replicas` (1 or -1) on a slot's devices."""
        self._groups_led[slot.leader.node_id] += replicas * (len(slot.parts) > 1)
        if slot.overcommit <= 1:
            self._awake_in_pop[deployment.deployment_id, slot.leader.pop] += replicas
        for part in slot.parts:
            node_id = part.node.node_id
            self._invalidate(node_id)
            for device_id in part.device_ids:
                self.free[node_id, device_id] -= replicas * slot.memory_bytes
                for sharing in (self._sharing, self._sharing_after_release):
                    sharing.book((node_id, device_id), slot.awake_bytes, slot.overcommit, replicas)
            domain = self._fleet.failure_domain(node_id)
            self._replicas_in_domain[deployment.deployment_id, domain] += replicas
