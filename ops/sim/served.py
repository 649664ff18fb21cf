"""Computes how the warm replicas serve users, in the same way for every placement compared.

If a deployment's nearest replicas have capacity for all its users, no load assignment is computed:
the users go there. The nearest replicas are cached until they change, so that a minute of the
planet takes milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from isochrone.wire.ids import NodeId
from ops.sim.planet_world import OUTPUT_TOKENS, PROMPT_TOKENS, PlanetWorld
from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.placement.fleet.latency_table import LatencyTable
from scheduler.decide.placement.score import UNSERVED_MS
from scheduler.decide.placement.search.load_assignment import LoadAssignment

WarmNodes = Mapping[int, Iterable[NodeId]]
"""The node of each warm replica, by the number of the deployment."""


class ServedMinute(NamedTuple):
    """The service of users in one minute. `rtt_p90_all_ms` counts unserved requests as farthest."""

    asked_per_s: float
    served_share: float
    rtt_mean_ms: float
    rtt_p50_ms: float
    rtt_p90_ms: float
    rtt_p90_all_ms: float


class OpenSites(NamedTuple):
    """The PoPs with warm replicas of one deployment: distances, capacity, nearest per city."""

    warm_nodes: Counter[NodeId]
    latency: LatencyTable
    capacity: Floats
    """Requests/s of each open site."""
    nearest: Ints
    """The nearest open site of each city."""
    nearest_ms: Floats


class ServedRates(NamedTuple):
    """Requests/s that are served, with the latency of each."""

    ms: Floats
    requests_per_s: Floats


class UserTraffic:
    """The users of all cities."""

    def __init__(self, world: PlanetWorld) -> None:
        self._world = world
        self._rtt_ms: Floats = Distances(world.pops, ()).ms
        pops = {pop.pop: number for number, pop in enumerate(world.pops)}
        self._pop_of = {node.node_id: pops[node.pop] for node in world.nodes}
        self._class_of = {node.node_id: node.devices[0].device_class for node in world.nodes}
        self._open_sites: dict[int, OpenSites] = {}

    def serve(self, requests: Floats, warm: WarmNodes, lost: set[NodeId]) -> ServedMinute:
        """Serve a minute's requests, each by the nearest warm replica with capacity left.

        `requests` are requests/s by city (row) and deployment (column); `lost` nodes serve none.
        """
        parts = [
            self._serve_deployment(
                number, requests[:, number], Counter(node for node in nodes if node not in lost)
            )
            for number, nodes in warm.items()
        ]
        ms = np.concatenate([part.ms for part in parts])
        weight = np.concatenate([part.requests_per_s for part in parts])
        order = np.argsort(ms)
        cumulative = np.cumsum(weight[order])
        total, served = float(requests.sum()), float(weight.sum())

        def percentile(share: float, total_per_s: float) -> float:
            index = int(np.searchsorted(cumulative, share * total_per_s))
            return round(float(ms[order[index]]) if index < len(ms) else UNSERVED_MS, 2)

        return ServedMinute(
            asked_per_s=round(total, 1),
            served_share=round(served / total, 5),
            rtt_mean_ms=round(float(ms @ weight / served), 2),
            rtt_p50_ms=percentile(0.5, served),
            rtt_p90_ms=percentile(0.9, served),
            rtt_p90_all_ms=percentile(0.9, total),
        )

    def beyond(self, requests: Floats, warm: WarmNodes, ms: float) -> Floats:
        """Return the requests/s of each deployment that are served from beyond `ms`, or not."""
        left: Floats = requests.sum(axis=0)
        for number, nodes in warm.items():
            served = self._serve_deployment(number, requests[:, number], Counter(nodes))
            left[number] -= float(served.requests_per_s[served.ms <= ms].sum())
        return left

    def _serve_deployment(
        self, number: int, requests: Floats, warm_nodes: Counter[NodeId]
    ) -> ServedRates:
        """Serve the requests of one deployment."""
        sites = self._open_sites.get(number)
        if sites is None or sites.warm_nodes != warm_nodes:
            sites = self._open_sites[number] = self._find_open_sites(number, warm_nodes)
        if not len(sites.capacity):
            return ServedRates(sites.nearest_ms, sites.nearest_ms)
        load = np.bincount(sites.nearest, requests, len(sites.capacity))
        if (load <= sites.capacity).all():
            return ServedRates(sites.nearest_ms, requests)
        cities = np.flatnonzero(requests > 0)
        rates = requests[cities]
        assignment = LoadAssignment(
            rates, rates, sites.latency, sites.capacity, UNSERVED_MS, cities
        )
        return ServedRates(*assignment.latencies())

    def _find_open_sites(self, number: int, warm_nodes: Counter[NodeId]) -> OpenSites:
        capacity = np.zeros(len(self._world.pops))
        for node_id, count in warm_nodes.items():
            capacity[self._pop_of[node_id]] += count * self._requests_per_s(number, node_id)
        sites = np.flatnonzero(capacity > 0)
        if not len(sites):
            nothing = np.zeros(0)
            no_sites = LatencyTable(np.zeros((len(self._rtt_ms), 0)))
            return OpenSites(warm_nodes, no_sites, nothing, sites, nothing)
        latency = LatencyTable(self._rtt_ms[:, sites])
        nearest, nearest_ms = latency.by_site.argmin(axis=0), latency.by_site.min(axis=0)
        return OpenSites(warm_nodes, latency, capacity[sites], nearest, nearest_ms)

    def _requests_per_s(self, number: int, node_id: NodeId) -> float:
        """Return the requests/s of a replica at full capacity, without the planner's headroom."""
        profile = self._world.rates[number, self._class_of[node_id]]
        each_s = PROMPT_TOKENS / profile.prefill_tokens_per_s
        each_s += OUTPUT_TOKENS / profile.decode_tokens_per_s
        return 1.0 / each_s
