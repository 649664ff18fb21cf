"""How soon a replica would be warm on a node: its queue, then its bytes over their tier.

Tiers, the nearest first: the node's host memory, its disk, a node of the same PoP, another city.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.model import Model
from isochrone.wire.report import ReplicaState
from scheduler.decide.cluster import FleetNode, Placement
from scheduler.decide.placement.score import Distances

MB: Final = 1_000_000

HOST_BYTES_PER_S: Final = 10_000 * MB
DISK_BYTES_PER_S: Final = 1_000 * MB
POP_BYTES_PER_S: Final = 1_000 * MB

WAN_BYTES_PER_S: Final = ((9.0, 1_200 * MB), (36.0, 950 * MB), (90.0, 400 * MB))
WAN_FAR_BYTES_PER_S: Final = 100 * MB
"""Median throughput between clouds by distance (500, 2,000, 5,000 km, as round trips in ms), for as
long as a node has not measured its own."""

RATE_MIN: Final = 1.0
RATE_MAX: Final = 1e15
"""Bytes/s: what a node reports below or beyond is an error in measuring, and no rate at all."""

ENGINE_START_S: Final = 5.0
"""What an engine takes to come up beside its weights."""

COMING: Final = (ReplicaState.WANTED, ReplicaState.FETCHING, ReplicaState.LOADING)


class StartTimes:
    """How soon each node would have each model warm, in one picture."""

    def __init__(
        self,
        nodes: Iterable[FleetNode],
        placements: Sequence[Placement],
        weights_bytes: Mapping[str, int],
        far: Distances,
    ) -> None:
        self._far = far
        self._holders: dict[str, set[PopId]] = defaultdict(set)
        for node in nodes:
            for digest in node.artifacts:
                self._holders[digest].add(node.pop)
        self._queue_bytes: dict[NodeId, int] = defaultdict(int)
        for placement in placements:
            if placement.state in COMING and not placement.is_ending:
                size = weights_bytes.get(placement.deployment_id, 0)
                for node_id in placement.node_ids:
                    self._queue_bytes[node_id] += size
        self._nearest: dict[tuple[str, PopId], float] = {}

    def start_s(self, node: FleetNode, model: Model) -> float:
        """Return the seconds from now until a replica of `model` would be warm on `node`."""
        digest = model.artifact.digest
        disk = _believed(node.disk_bytes_per_s) or DISK_BYTES_PER_S
        queue_s = self._queue_bytes[node.node_id] / disk
        if digest in node.in_host_memory:
            return ENGINE_START_S + queue_s + model.weights_bytes / HOST_BYTES_PER_S
        load_s = ENGINE_START_S + queue_s + model.weights_bytes / disk
        if digest in node.artifacts:
            return load_s
        return load_s + self.fetch_s(node, model)

    def is_held_in(self, pop: PopId, digest: str) -> bool:
        """Say whether any node of a PoP has these weights."""
        return pop in self._holders[digest]

    def fetch_s(self, node: FleetNode, model: Model) -> float:
        """Return how long a model's weights would be on their way to a node that lacks them."""
        rate = self._fetch_bytes_per_s(node, model.artifact.digest)
        return model.artifact.size_bytes / rate

    def queue(self, node_id: NodeId, model: Model) -> None:
        """Count one start more on a node: the next waits behind it."""
        self._queue_bytes[node_id] += model.weights_bytes

    def unqueue(self, node_id: NodeId, model: Model) -> None:
        """Take back a start that will not be."""
        self._queue_bytes[node_id] -= model.weights_bytes

    def _fetch_bytes_per_s(self, node: FleetNode, digest: str) -> float:
        if self.is_held_in(node.pop, digest):
            return POP_BYTES_PER_S
        if _believed(node.fetch_bytes_per_s):
            return node.fetch_bytes_per_s
        key = digest, node.pop
        if key not in self._nearest:
            ways = [self._far.between(node.pop, pop) for pop in self._holders[digest]]
            rtt_ms = min(ways, default=1e9)
            rates = (rate for within_ms, rate in WAN_BYTES_PER_S if rtt_ms <= within_ms)
            self._nearest[key] = float(next(rates, WAN_FAR_BYTES_PER_S))
        return self._nearest[key]


def _believed(measured: float) -> float:
    """Return a rate that can be one; 0, not known, for any other."""
    return measured if RATE_MIN <= measured <= RATE_MAX else 0.0
