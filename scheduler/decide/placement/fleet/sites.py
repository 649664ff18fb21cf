"""The sites of a fleet. A site is all devices of one class in one PoP.

Slots at one site differ only in how full their devices are, so the search chooses sites first and
devices afterwards.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from isochrone.wire.ids import DeviceId, NodeId, PopId
from scheduler.decide.arrays import Ints
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.cluster import FleetNode, Placement
from scheduler.decide.placement.fleet.latency_table import LatencyTable


class FleetSite(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of one class in one PoP, and the nodes that have them."""

    index: int
    pop: PopId
    device_class: str
    nodes: tuple[NodeId, ...]


class EligibleNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a site that may take replicas, with their devices' memory, largest first.

    Every node has at least `disk_free_bytes` free, and its n-th largest device has at least
    `memory_floor[n]` bytes. `memory_floor` is empty where a node refused a deployment lately: then
    each node must be checked.
    """

    nodes: list[FleetNode]
    device_memory: list[list[int]]
    largest_bytes: int
    memory_floor: list[int]
    disk_free_bytes: float


class SitesWithEngine(NamedTuple):
    """For each site whether some, and whether all, of its eligible nodes can start an engine."""

    some: NDArray[np.bool_]
    every: NDArray[np.bool_]


class SiteTable:
    """All sites by index, the devices of each, and its latency from every city."""

    def __init__(self, nodes: Sequence[FleetNode], distances: Distances) -> None:
        self.sites = _group_into_sites(nodes)
        self.index = {(site.pop, site.device_class): site.index for site in self.sites}
        self.device_classes = sorted({site.device_class for site in self.sites})
        self.sites_of_node: dict[NodeId, list[int]] = defaultdict(list)
        self.sites_of_pop: dict[PopId, list[int]] = defaultdict(list)
        for site in self.sites:
            self.sites_of_pop[site.pop].append(site.index)
            for node_id in site.nodes:
                self.sites_of_node[node_id].append(site.index)
        columns = [distances.index[site.pop] for site in self.sites]
        self.latency = LatencyTable(distances.ms[:, columns])
        numbers = {name: number for number, name in enumerate(self.device_classes)}
        self.class_numbers: Ints = np.array(
            [numbers[site.device_class] for site in self.sites], np.int64
        )
        self._in_pops: dict[frozenset[PopId], NDArray[np.bool_]] = {}
        self._site_of_device: dict[tuple[NodeId, DeviceId], int] = {}
        self.healthy_devices: dict[tuple[int, NodeId], list[tuple[NodeId, DeviceId]]] = defaultdict(
            list
        )
        for node in nodes:
            for device in node.devices:
                key = node.node_id, device.device_id
                site_index = self.index[node.pop, device.device_class]
                self._site_of_device[key] = site_index
                if device.healthy:
                    self.healthy_devices[site_index, node.node_id].append(key)

    def in_pops(self, pops: frozenset[PopId]) -> NDArray[np.bool_]:
        """Say for each site whether it is in one of these PoPs. Cached: most policies say the
        same."""
        if pops not in self._in_pops:
            self._in_pops[pops] = np.array([site.pop in pops for site in self.sites], bool)
        return self._in_pops[pops]

    def site_of_placement(self, placement: Placement, node: FleetNode) -> int:
        """Return the site of a placement on `node`, or -1 if the node has no device.

        A placement whose devices are no longer known counts as on the node's first device.
        """
        for device_id in placement.device_ids:
            site = self._site_of_device.get((node.node_id, device_id))
            if site is not None:
                return site
        if not node.devices:
            return -1
        return self._site_of_device[node.node_id, node.devices[0].device_id]

    def largest_node_devices(self, device_class: str) -> int:
        """Return how many healthy devices of a class the largest node has."""
        counts = (
            len(devices)
            for (site, _), devices in self.healthy_devices.items()
            if self.sites[site].device_class == device_class
        )
        return max(counts, default=0)


def eligible_nodes_of(site: FleetSite, candidates: Sequence[FleetNode]) -> EligibleNodes:
    """Return those of `candidates` that have healthy devices at a site, with their memory."""
    nodes, device_memory = [], []
    for node in candidates:
        sizes = [
            d.memory_bytes
            for d in node.devices
            if d.healthy and d.device_class == site.device_class
        ]
        if sizes:
            nodes.append(node)
            device_memory.append(sorted(sizes, reverse=True))
    return EligibleNodes(
        nodes=nodes,
        device_memory=device_memory,
        largest_bytes=max((sizes[0] for sizes in device_memory), default=0),
        memory_floor=[min(nth) for nth in zip(*device_memory, strict=False)]
        if not any(node.refused for node in nodes)
        else [],
        # A node that reports 0 does not know how much disk it has.
        disk_free_bytes=min((n.disk_free_bytes or inf for n in nodes), default=inf),
    )


def _group_into_sites(nodes: Sequence[FleetNode]) -> tuple[FleetSite, ...]:
    members: dict[tuple[PopId, str], list[NodeId]] = defaultdict(list)
    for node in nodes:
        for device_class in sorted({device.device_class for device in node.devices}):
            members[node.pop, device_class].append(node.node_id)
    return tuple(
        FleetSite(index=index, pop=pop, device_class=device_class, nodes=tuple(sorted(node_ids)))
        for index, ((pop, device_class), node_ids) in enumerate(sorted(members.items()))
    )
