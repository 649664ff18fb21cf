"""Predicts the time until a replica is warm on a node: queued loads, then fetch, load and start.

Weights come from the nearest tier that has them: the node's host memory, its disk, another node of
the same PoP, another city.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.models.model import CatalogModel
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.cluster import FleetNode, Placement

MB: Final = 1_000_000

HOST_BYTES_PER_S: Final = 10_000 * MB
DISK_BYTES_PER_S: Final = 1_000 * MB
POP_BYTES_PER_S: Final = 1_000 * MB
"""Assumed rates of host memory, of a disk and of a PoP's own network."""

WAN_BYTES_PER_S: Final = ((9.0, 1_200 * MB), (36.0, 950 * MB), (90.0, 400 * MB))
WAN_FAR_BYTES_PER_S: Final = 100 * MB
"""Median throughput between clouds up to a round trip in ms (about 500, 2,000 and 5,000 km), used
until a node has measured its own rate."""

RATE_MIN: Final = 1.0
RATE_MAX: Final = 1e15
"""Bytes/s: a reported rate outside this range is a measuring error and is ignored."""

ENGINE_START_S: Final = 5.0
"""Time for an engine to start, without loading its weights."""

COMING: Final = (ReplicaState.WANTED, ReplicaState.FETCHING, ReplicaState.LOADING)
"""The states of a replica that has not served yet but will."""


def queued_bytes(
    placements: Sequence[Placement], weights_bytes: Mapping[str, int]
) -> defaultdict[NodeId, int]:
    """Return the bytes of weights that each node still has to load, by `weights_bytes` of each
    deployment."""
    queued: defaultdict[NodeId, int] = defaultdict(int)
    for placement in placements:
        if placement.state in COMING and not placement.is_ending:
            size = weights_bytes.get(placement.deployment_id, 0)
            for node_id in placement.node_ids:
                queued[node_id] += size
    return queued


class StartTimes:
    """Estimates how long nodes need to make a model warm, from where its weights are now."""

    def __init__(self, nodes: Iterable[FleetNode], distances: Distances) -> None:
        self._distances = distances
        self._pops_with: dict[str, set[PopId]] = defaultdict(set)
        for node in nodes:
            for digest in node.artifacts:
                self._pops_with[digest].add(node.pop)
        self._wan_rates: dict[tuple[str, PopId], float] = {}
        self._fetch_s: dict[tuple[NodeId, str], float] = {}

    def start_s(self, node: FleetNode, model: CatalogModel, queued_bytes: int) -> float:
        """Return the seconds until a replica of `model` would be warm on `node`.

        `queued_bytes` of other weights are loaded first.
        """
        digest = model.artifact.digest
        disk = plausible_rate(node.disk_bytes_per_s) or DISK_BYTES_PER_S
        queue_s = queued_bytes / disk
        if digest in node.in_host_memory:
            return ENGINE_START_S + queue_s + model.weights_bytes / HOST_BYTES_PER_S
        load_s = ENGINE_START_S + queue_s + model.weights_bytes / disk
        if digest in node.artifacts:
            return load_s
        return load_s + self.fetch_s(node, model)

    def is_held_in(self, pop: PopId, digest: str) -> bool:
        """Return whether any node of a PoP has these weights on its disk."""
        return pop in self._pops_with.get(digest, ())

    def pops_with(self, model: CatalogModel) -> set[PopId]:
        """Return the PoPs in which a node has a model's weights on its disk."""
        return self._pops_with.get(model.artifact.digest, set())

    def fetch_s(self, node: FleetNode, model: CatalogModel) -> float:
        """Return the seconds to copy a model's weights to a node that lacks them."""
        key = node.node_id, model.artifact.digest
        if key not in self._fetch_s:
            rate = self._fetch_bytes_per_s(node, model.artifact.digest)
            self._fetch_s[key] = model.artifact.size_bytes / rate
        return self._fetch_s[key]

    def _fetch_bytes_per_s(self, node: FleetNode, digest: str) -> float:
        if self.is_held_in(node.pop, digest):
            return POP_BYTES_PER_S
        if plausible_rate(node.fetch_bytes_per_s):
            return node.fetch_bytes_per_s
        key = digest, node.pop
        if key not in self._wan_rates:
            round_trips = [
                self._distances.between(node.pop, pop) for pop in self._pops_with.get(digest, ())
            ]
            rtt_ms = min(round_trips, default=1e9)
            rates = (rate for within_ms, rate in WAN_BYTES_PER_S if rtt_ms <= within_ms)
            self._wan_rates[key] = float(next(rates, WAN_FAR_BYTES_PER_S))
        return self._wan_rates[key]


def plausible_rate(measured: float) -> float:
    """Return a measured rate in bytes/s, or 0 if it is unknown or cannot be right."""
    return measured if RATE_MIN <= measured <= RATE_MAX else 0.0
