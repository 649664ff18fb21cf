"""The fleet as the planner reads it. It never changes while a plan is made.

The memory and ports that a plan takes are booked in `search/slot_ledger.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.models.model import CatalogModel, Deployment, PlacementPolicy
from isochrone.wire.peers.routes import Pop
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.capacity.start_times import StartTimes
from scheduler.decide.cluster import ClusterState, FleetNode, Liveness, Placement
from scheduler.decide.membership.liveness import LivenessView
from scheduler.decide.placement.fleet.eligible_sites import EligibleSites
from scheduler.decide.placement.fleet.sites import (
    SitesWithEngine,
    SiteTable,
    eligible_nodes_of,
)
from scheduler.decide.placement.fleet.slots import DISK_MARGIN_BYTES, residency_allows
from scheduler.decide.placement.fleet.start_backoff import StartHistory
from scheduler.decide.placement.fleet.start_bounds import StartBounds

LATENCIES_KEPT_MAX: Final = 32
"""For how many sets of sites round trips are kept side by side: of a large fleet, a megabyte each.
The deployments of a fleet share about a dozen sets, unless each has a residency of its own."""


class FleetCapacity:
    """Nodes, sites, distances, liveness and recent failures of one cluster state. Immutable."""

    def __init__(self, cluster: ClusterState, liveness: LivenessView) -> None:
        self.liveness = liveness
        self.pops: Mapping[PopId, Pop] = {pop.pop: pop for pop in cluster.pops}
        self.nodes: Mapping[NodeId, FleetNode] = {node.node_id: node for node in cluster.nodes}
        self.distances = Distances(cluster.pops, cluster.distances)
        self.table = SiteTable(cluster.nodes, self.distances)
        self.sites = self.table.sites
        self.start_times = StartTimes(cluster.nodes, self.distances)
        self.start_bounds = StartBounds(self.sites, self.nodes, self.start_times, self.distances)
        self.start_history = StartHistory(cluster)
        ready = {
            node.node_id
            for node in cluster.nodes
            if not (node.draining or node.revoked)
            and liveness.by_node[node.node_id] is Liveness.READY
        }
        self._eligible = [
            eligible_nodes_of(site, [self.nodes[n] for n in site.nodes if n in ready])
            for site in self.sites
        ]
        self._largest_bytes = np.array([e.largest_bytes for e in self._eligible], np.float64)
        self._disk_free_bytes = np.array([e.disk_free_bytes for e in self._eligible], np.float64)
        # Shared by deployments that fit on the same sites.
        self._eligible_by_sites: dict[bytes, EligibleSites] = {}
        self._memory_floors: dict[int, Floats] = {}
        self._with_engine: dict[str, SitesWithEngine] = {}
        self._staying = {
            node.node_id
            for node in cluster.nodes
            if not node.draining and liveness.is_in_fleet(node)
        }
        self._unhealthy = {
            (node.node_id, device.device_id): device.reason or "it is reported as unhealthy"
            for node in cluster.nodes
            for device in node.devices
            if not device.healthy
        }
        self.may_leave = bool(self._unhealthy) or any(node.draining for node in cluster.nodes)
        """Whether any placement may have a `leaving_reason`."""
        self._allowed_pops: dict[tuple[tuple[str, ...], tuple[str, ...]], frozenset[PopId]] = {}

    def failure_domain(self, node_id: NodeId) -> str:
        """Return the name of the domain that fails together with a node."""
        return self.nodes[node_id].failure_domain or str(node_id)

    def stays(self, placement: Placement) -> bool:
        """Say whether all nodes of a placement stay in the fleet, and its devices are healthy."""
        return self._staying.issuperset(placement.node_ids) and not self.leaving_reason(placement)

    def leaving_reason(self, placement: Placement) -> str:
        """Return why a placement should move: a draining node or an unhealthy device; else ""."""
        if not self.may_leave:
            return ""
        for part in placement.parts:
            node = self.nodes.get(part.node_id)
            if node is not None and node.draining:
                return f"node {node.node_id} is draining"
            for device_id in part.device_ids if self._unhealthy else ():
                if reason := self._unhealthy.get((part.node_id, device_id)):
                    return f"{device_id} of node {part.node_id} is unhealthy ({reason})"
        return ""

    def is_heard(self, placement: Placement) -> bool:
        """Say whether all nodes of a placement are in contact now."""
        return all(
            self.liveness.by_node.get(node_id) is Liveness.READY for node_id in placement.node_ids
        )

    def site_of_placement(self, placement: Placement) -> int:
        """Return the site of a placement on a known node; -1 if the node has no device."""
        return self.table.site_of_placement(placement, self.nodes[placement.node_id])

    def allowed_pops(self, policy: PlacementPolicy) -> frozenset[PopId]:
        """Return the PoPs that residency allows. Cached: most policies say the same."""
        key = policy.allow, policy.deny
        if key not in self._allowed_pops:
            self._allowed_pops[key] = frozenset(
                pop.pop for pop in self.pops.values() if residency_allows(policy, pop)
            )
        return self._allowed_pops[key]

    def sites_with(self, nodes: Mapping[int, Sequence[FleetNode]]) -> EligibleSites:
        """Return these sites with the nodes of each, for one deployment alone."""
        return EligibleSites(nodes, self.table, keeps_latency=False)

    def eligible_sites(
        self, deployment: Deployment, model: CatalogModel, needed: int
    ) -> EligibleSites:
        """Return the nodes that could take a replica of a deployment if they were empty, by site.

        A replica takes `needed` bytes of each device.
        """
        engine = deployment.engine
        count = engine.devices_per_node
        if count * engine.nodes != engine.devices or self.start_history.backoff_of(
            deployment.deployment_id
        ):
            return self.sites_with({})
        digest, disk_bytes = model.artifact.digest, model.artifact.size_bytes + DISK_MARGIN_BYTES
        may_fit = self.table.in_pops(self.allowed_pops(deployment.policy)) & (
            self._largest_bytes >= needed
        )
        all_fit = may_fit & (self._memory_floor(count) >= needed) & (engine.nodes == 1)
        all_fit &= self._disk_free_bytes >= disk_bytes
        with_engine = self._sites_with_engine(engine.driver)
        may_fit &= with_engine.some
        all_fit &= with_engine.every
        is_exact = not (may_fit & ~all_fit).any()
        key = all_fit.tobytes()
        if is_exact and key in self._eligible_by_sites:
            return self._eligible_by_sites[key]
        nodes_by_site = {
            site: self._eligible[site].nodes for site in np.flatnonzero(all_fit).tolist()
        }
        if is_exact:
            keeps_latency = len(self._eligible_by_sites) < LATENCIES_KEPT_MAX
            shared = EligibleSites(nodes_by_site, self.table, keeps_latency=keeps_latency)
            self._eligible_by_sites[key] = shared
            return shared
        for site in np.flatnonzero(may_fit & ~all_fit).tolist():
            eligible = self._eligible[site]
            nodes = [
                node
                for node, sizes in zip(eligible.nodes, eligible.device_memory, strict=True)
                if len(sizes) >= count
                and sizes[count - 1] >= needed
                and (not 0 < node.disk_free_bytes < disk_bytes or digest in node.artifacts)
                and (engine.nodes == 1 or node.rank_ports is not None)
                and engine.driver not in node.lacking_engines
                and node.refusal_of(deployment.deployment_id, deployment.version) is None
            ]
            if len(nodes) >= engine.nodes:
                nodes_by_site[site] = nodes
        return self.sites_with(dict(sorted(nodes_by_site.items())))

    def _sites_with_engine(self, driver: str) -> SitesWithEngine:
        """Return the sites whose eligible nodes can start an engine. Cached."""
        if driver not in self._with_engine:
            able = [
                [driver not in node.lacking_engines for node in eligible.nodes]
                for eligible in self._eligible
            ]
            self._with_engine[driver] = SitesWithEngine(
                some=np.array([any(nodes) for nodes in able], bool),
                every=np.array([all(nodes) for nodes in able], bool),
            )
        return self._with_engine[driver]

    def _memory_floor(self, count: int) -> Floats:
        """Return for each site the bytes that the `count` largest devices of any node have; 0 where
        nodes must be looked at."""
        if count not in self._memory_floors:
            floors = (eligible.memory_floor for eligible in self._eligible)
            self._memory_floors[count] = np.array(
                [floor[count - 1] if len(floor) >= count else 0 for floor in floors], np.float64
            )
        return self._memory_floors[count]
