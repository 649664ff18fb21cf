"""The ground that replicas are seated on: sites, the nodes of each, the memory left on devices.

A site is what a PoP has of one class of device. Its seats are alike but for how full they are, so a
plan is sought over sites and only then seated on devices, the tightest fit first.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from math import inf
from operator import itemgetter

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, DeviceId, NodeId, PopId
from isochrone.wire.model import Deployment, Model, Policy
from isochrone.wire.report import ReplicaState
from isochrone.wire.routes import Pop
from scheduler.decide.capacity.start_times import StartTimes
from scheduler.decide.cluster import ClusterState, FleetNode, Liveness, Placement
from scheduler.decide.membership.liveness import LivenessView
from scheduler.decide.placement.fleet.slots import (
    DISK_MARGIN_BYTES,
    Slot,
    SlotPart,
    free_memory,
    replica_memory_bytes,
    residency_allows,
)
from scheduler.decide.placement.fleet.start_backoff import start_backoff
from scheduler.decide.placement.score import FAILED_HERE, Distances, start_cost
from scheduler.decide.placement.search.load_assignment import Floats, Ints


class FleetSite(msgspec.Struct, frozen=True, kw_only=True):
    """What one PoP has of one class of device."""

    index: int
    pop: PopId
    device_class: str
    nodes: tuple[NodeId, ...]


class EligibleNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a site that may take replicas, each with its devices' sizes, largest first.

    Each has at least `disk_free_bytes`, and as many devices of the sizes `sure`, largest first;
    where one refused anything lately, nothing is sure.
    """

    nodes: list[FleetNode]
    sizes: list[list[int]]
    largest_bytes: int
    sure: list[int]
    disk_free_bytes: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A seat that could be taken now, and what it costs to bring a replica up on it."""

    seat: Slot
    site: int
    start_s: float
    cost: float


class FleetCapacity:
    """The fleet as the search sees it; memory is taken and given back as seats are tried."""

    def __init__(self, cluster: ClusterState, view: LivenessView) -> None:
        self.view = view
        self.pops: Mapping[PopId, Pop] = {pop.pop: pop for pop in cluster.pops}
        self.nodes: Mapping[NodeId, FleetNode] = {node.node_id: node for node in cluster.nodes}
        self.far = Distances(cluster.pops, cluster.distances)
        self.free: dict[tuple[NodeId, DeviceId], int] = dict(
            free_memory(cluster.nodes, cluster.placements)
        )
        self.sites = _sites(cluster.nodes)
        self._offers: dict[tuple[DeploymentId, int, bool], tuple[int, Candidate | None]] = {}
        self._stamps = [0] * len(self.sites)
        self._sites_on: dict[NodeId, list[int]] = defaultdict(list)
        for site in self.sites:
            for node_id in site.nodes:
                self._sites_on[node_id].append(site.index)
        self._leaving: dict[tuple[NodeId, DeviceId], int] = defaultdict(int)
        for placement in cluster.placements:
            if placement.is_ending:
                self.let_go(placement, 1)
        self.is_draining = any(node.draining for node in cluster.nodes)
        self.site_of = {(site.pop, site.device_class): site.index for site in self.sites}
        self.device_classes = sorted({site.device_class for site in self.sites})
        columns = [self.far.index[site.pop] for site in self.sites]
        self._far_to_sites: Floats = np.ascontiguousarray(self.far.ms[:, columns])
        self._far_from: dict[bytes, Floats] = {}
        classes = {name: number for number, name in enumerate(self.device_classes)}
        self.class_at: Ints = np.array([classes[s.device_class] for s in self.sites], np.int64)
        self._site_of_device: dict[tuple[NodeId, DeviceId], int] = {}
        self._devices: dict[tuple[int, NodeId], list[tuple[NodeId, DeviceId]]] = defaultdict(list)
        for node in cluster.nodes:
            for device in node.devices:
                key = node.node_id, device.device_id
                at = self._site_of_device[key] = self.site_of[node.pop, device.device_class]
                if device.healthy:
                    self._devices[at, node.node_id].append(key)
        self._ready = [self._ready_at(site) for site in self.sites]
        self.staying = {
            node.node_id for node in cluster.nodes if not node.draining and view.counts(node)
        }
        self._residents: dict[tuple[tuple[str, ...], tuple[str, ...]], frozenset[PopId]] = {}
        self._failed: Counter[tuple[DeploymentId, NodeId]] = Counter()
        self._taken: dict[tuple[DeploymentId, str], int] = defaultdict(int)
        self._led: dict[NodeId, int] = defaultdict(int)
        for placement in cluster.placements:
            self._led[placement.node_id] += placement.rank_port > 0
            for part in placement.parts:
                if part.state is ReplicaState.FAILED:
                    self._failed[part.deployment_id, part.node_id] += 1
                if part.node_id in self.nodes:
                    self._taken[part.deployment_id, self.domain_of(part.node_id)] += 1
        self.held_back: dict[DeploymentId, str] = {}
        versions = {
            deployment.deployment_id: deployment.version for deployment in cluster.deployments
        }
        for given_up in cluster.given_up:
            name = given_up.deployment_id
            if given_up.version == versions.get(name):
                self._failed.update((name, node_id) for node_id in given_up.node_ids)
                self.held_back[name] = start_backoff(given_up, cluster.placements)
        models = {model.model_id: model for model in cluster.models}
        self._starts = StartTimes(
            cluster.nodes,
            cluster.placements,
            {
                d.deployment_id: models[d.model_id].weights_bytes
                for d in cluster.deployments
                if d.model_id in models
            },
            self.far,
        )

    def far_from(self, cities: Ints) -> Floats:
        """Return ms from some cities to each site. Most deployments are asked for by the same."""
        key = cities.tobytes()
        if key not in self._far_from:
            self._far_from[key] = self._far_to_sites[cities]
        return self._far_from[key]

    def domain_of(self, node_id: NodeId) -> str:
        """Return what fails together with a node."""
        return self.nodes[node_id].failure_domain or str(node_id)

    def crowd(self, deployment_id: DeploymentId, node_id: NodeId) -> int:
        """Return how many replicas of a deployment would fail together with a node."""
        return self._taken[deployment_id, self.domain_of(node_id)]

    def broke_on(self, deployment_id: DeploymentId, node_id: NodeId) -> int:
        """Return how many replicas of a deployment a node gave up of late."""
        return self._failed.get((deployment_id, node_id), 0)

    def site_of_placement(self, placement: Placement) -> int:
        """Return the site that a placement on a known node is at; -1 where its device is none."""
        node = self.nodes[placement.node_id]
        # One whose devices are not known any more is taken to be on the first that is.
        for device_id in (*placement.device_ids, *(d.device_id for d in node.devices[:1])):
            site = self._site_of_device.get((node.node_id, device_id), -1)
            if site >= 0:
                return site
        return -1

    def residents(self, policy: Policy) -> frozenset[PopId]:
        """Return the PoPs that residency allows. Most policies say the same: each is read once."""
        key = policy.allow, policy.deny
        if key not in self._residents:
            self._residents[key] = frozenset(
                pop.pop for pop in self.pops.values() if residency_allows(policy, pop)
            )
        return self._residents[key]

    def devices_most(self, device_class: str) -> int:
        """Return how many healthy devices of a class the largest node has."""
        sizes = (
            len(devices)
            for (site, _), devices in self._devices.items()
            if self.sites[site].device_class == device_class
        )
        return max(sizes, default=0)

    def may_hold(self, deployment: Deployment, model: Model) -> dict[int, list[FleetNode]]:
        """Return by site the nodes that may take a replica of a deployment, were they empty."""
        needed = replica_memory_bytes(model, deployment.engine)
        engine = deployment.engine
        count = engine.devices_per_node
        if count * engine.nodes != engine.devices or self.held_back.get(deployment.deployment_id):
            return {}
        digest, disk = model.artifact.digest, model.artifact.size_bytes + DISK_MARGIN_BYTES
        residents = self.residents(deployment.policy)
        nodes_of: dict[int, list[FleetNode]] = {}
        for site, ready in zip(self.sites, self._ready, strict=True):
            if ready.largest_bytes < needed or site.pop not in residents:
                continue
            sure = len(ready.sure) >= count and ready.sure[count - 1] >= needed
            if sure and engine.nodes == 1 and ready.disk_free_bytes >= disk:
                nodes_of[site.index] = ready.nodes
                continue
            nodes = [
                node
                for node, sizes in zip(ready.nodes, ready.sizes, strict=True)
                if len(sizes) >= count
                and sizes[count - 1] >= needed
                and (not 0 < node.disk_free_bytes < disk or digest in node.artifacts)
                and (engine.nodes == 1 or node.rank_ports is not None)
                and not (node.refused and deployment.deployment_id in dict(node.refused))
            ]
            if len(nodes) >= engine.nodes:
                nodes_of[site.index] = nodes
        return nodes_of

    def offer(
        self,
        site: int,
        nodes: Sequence[FleetNode],
        deployment: Deployment,
        model: Model,
        soon: bool = False,
    ) -> Candidate | None:
        """Return the best seat of a site that is free, or will be `soon`: spread, ready, tight."""
        key = (deployment.deployment_id, site, soon)
        known = self._offers.get(key)
        if known is None or known[0] != self._stamps[site]:
            found = self._look(site, nodes, deployment, model, soon)
            known = self._offers[key] = (self._stamps[site], found)
        return known[1]

    def _look(
        self,
        site: int,
        nodes: Sequence[FleetNode],
        deployment: Deployment,
        model: Model,
        soon: bool,
    ) -> Candidate | None:
        needed, engine = replica_memory_bytes(model, deployment.engine), deployment.engine
        found: list[tuple[tuple[float, int, int, str], FleetNode, tuple[DeviceId, ...], float]] = []
        for node in nodes:
            fitting = self._fitting(node, site, needed, engine.devices_per_node, soon)
            if not fitting:
                continue
            start_s = self._starts.start_s(node, model)
            failed = self.broke_on(deployment.deployment_id, node.node_id)
            cost = start_cost(start_s) + FAILED_HERE * failed
            crowd = self.crowd(deployment.deployment_id, node.node_id)
            left = self.free[node.node_id, fitting[0]] - needed
            order = (round(cost, 1) + 2.0 * crowd, crowd, left, str(node.node_id))
            found.append((order, node, fitting, start_s))
        chosen = nsmallest(engine.nodes, found, key=itemgetter(0))
        leader = self._leader_of([node for _, node, _, _ in chosen]) if engine.nodes > 1 else 0
        if len(chosen) < engine.nodes or leader < 0:
            return None
        chosen.insert(0, chosen.pop(leader))
        parts = tuple(SlotPart(node=node, device_ids=devices) for _, node, devices, _ in chosen)
        # It is up when its slowest part is.
        start_s = max(start_s for _, _, _, start_s in chosen)
        failed = max(self.broke_on(deployment.deployment_id, p.node.node_id) for p in parts)
        return Candidate(
            seat=Slot(parts=parts, memory_bytes=needed),
            site=site,
            start_s=start_s,
            cost=start_cost(start_s) + FAILED_HERE * failed,
        )

    def _leader_of(self, nodes: Sequence[FleetNode]) -> int:
        """Return the first with a port left for the others to meet at; -1 where none has."""
        for number, node in enumerate(nodes):
            first, last = node.rank_ports or (1, 0)
            if self._led[node.node_id] <= last - first:
                return number
        return -1

    def let_go(self, placement: Placement, sign: int) -> None:
        """Count (or no more count) a placement's memory as about to be free."""
        for part in placement.parts:
            self._stamp(part.node_id)
            for device_id in part.device_ids:
                self._leaving[part.node_id, device_id] += sign * part.memory_bytes

    def _fitting(
        self, node: FleetNode, site: int, needed: int, count: int, soon: bool
    ) -> tuple[DeviceId, ...]:
        """Return the tightest devices of a node that have room; () where too few have."""
        room = []
        for key in self._devices[site, node.node_id]:
            left = self.free[key] + (self._leaving[key] if soon else 0)
            if left >= needed:
                room.append((left, key[1]))
        if len(room) < count:
            return ()
        room.sort()
        return tuple(device_id for _, device_id in room[:count])

    def _stamp(self, node_id: NodeId) -> None:
        """Note that what was looked for on a node must be looked for again."""
        for site in self._sites_on.get(node_id, ()):
            self._stamps[site] += 1

    def _ready_at(self, site: FleetSite) -> EligibleNodes:
        """Return the nodes of a site that may take replicas, with their devices, largest first."""
        nodes, sizes = [], []
        for node in (self.nodes[node_id] for node_id in site.nodes):
            is_ready = self.view.by_node[node.node_id] is Liveness.READY
            if node.draining or node.revoked or not is_ready:
                continue
            held = [
                d.memory_bytes
                for d in node.devices
                if d.healthy and d.device_class == site.device_class
            ]
            if held:
                nodes.append(node)
                sizes.append(sorted(held, reverse=True))
        return EligibleNodes(
            nodes=nodes,
            sizes=sizes,
            largest_bytes=max((held[0] for held in sizes), default=0),
            sure=[min(nth) for nth in zip(*sizes, strict=False)]
            if not any(node.refused for node in nodes)
            else [],
            # A node that reports 0 says nothing of its disk.
            disk_free_bytes=min((n.disk_free_bytes or inf for n in nodes), default=inf),
        )

    def take(self, seat: Slot, deployment: Deployment, model: Model) -> None:
        """Take a seat's memory."""
        self._change(seat, deployment, -1)
        for part in seat.parts:
            self._starts.queue(part.node.node_id, model)

    def give_back(self, seat: Slot, deployment: Deployment, model: Model) -> None:
        """Give a seat's memory back."""
        self._change(seat, deployment, 1)
        for part in seat.parts:
            self._starts.unqueue(part.node.node_id, model)

    def _change(self, seat: Slot, deployment: Deployment, sign: int) -> None:
        self._led[seat.node.node_id] -= sign * (len(seat.parts) > 1)
        for part in seat.parts:
            node_id = part.node.node_id
            self._stamp(node_id)
            for device_id in part.device_ids:
                self.free[node_id, device_id] += sign * seat.memory_bytes
            self._taken[deployment.deployment_id, self.domain_of(node_id)] -= sign


def _sites(nodes: Sequence[FleetNode]) -> tuple[FleetSite, ...]:
    held: dict[tuple[PopId, str], list[NodeId]] = defaultdict(list)
    for node in nodes:
        for device_class in sorted({device.device_class for device in node.devices}):
            held[node.pop, device_class].append(node.node_id)
    return tuple(
        FleetSite(index=index, pop=pop, device_class=device_class, nodes=tuple(sorted(node_ids)))
        for index, ((pop, device_class), node_ids) in enumerate(sorted(held.items()))
    )
