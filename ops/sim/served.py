"""How users are served by the warm replicas, computed alike for every placement compared.

If a deployment's nearest replicas have room for all its users, no load assignment is computed: the
users go there. The nearest replicas are cached until they change, so that a minute of the planet
takes milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from isochrone.wire.ids import NodeId
from ops.sim.planet_world import OUTPUT_TOKENS, PROMPT_TOKENS, World
from scheduler.decide.flow import Floats, Flow, Ints
from scheduler.decide.score import UNSERVED_MS, Distances

WarmNodes = Mapping[int, Iterable[NodeId]]
"""The node of each warm replica, by the number of the deployment."""


class ServedMinute(NamedTuple):
    """What users got in one minute. `rtt_p90_all_ms` counts unserved requests as farthest."""

    asked_per_s: float
    served_share: float
    rtt_mean_ms: float
    rtt_p50_ms: float
    rtt_p90_ms: float
    rtt_p90_all_ms: float


class OpenSites(NamedTuple):
    """The PoPs with warm replicas of one deployment: distances, capacity, nearest per city."""

    held: Counter[NodeId]
    far: Floats
    rooms: Floats
    nearest: Ints
    ms: Floats


class UserTraffic:
    """The users of all cities."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._far: Floats = Distances(world.pops, ()).ms
        pops = {pop.pop: number for number, pop in enumerate(world.pops)}
        self._pop_of = {node.node_id: pops[node.pop] for node in world.nodes}
        self._kind_of = {node.node_id: node.devices[0].device_class for node in world.nodes}
        self._near: dict[int, OpenSites] = {}

    def serve(self, asked: Floats, seats: WarmNodes, lost: set[NodeId]) -> ServedMinute:
        """Serve a minute's requests, each by the nearest warm replica with capacity left."""
        parts = [
            self._serve_one(number, asked[:, number], Counter(n for n in held if n not in lost))
            for number, held in seats.items()
        ]
        ms = np.concatenate([part[0] for part in parts])
        weight = np.concatenate([part[1] for part in parts])
        order = np.argsort(ms)
        before = np.cumsum(weight[order])
        total, served = float(asked.sum()), float(weight.sum())

        def percentile(share: float, of: float) -> float:
            place = int(np.searchsorted(before, share * of))
            return round(float(ms[order[place]]) if place < len(ms) else UNSERVED_MS, 2)

        return ServedMinute(
            asked_per_s=round(total, 1),
            served_share=round(served / total, 5),
            rtt_mean_ms=round(float(ms @ weight / served), 2),
            rtt_p50_ms=percentile(0.5, served),
            rtt_p90_ms=percentile(0.9, served),
            rtt_p90_all_ms=percentile(0.9, total),
        )

    def beyond(self, asked: Floats, seats: WarmNodes, ms: float) -> Floats:
        """Return the requests/s by deployment that are served from farther than `ms`, or not at all."""
        left: Floats = asked.sum(axis=0)
        for number, held in seats.items():
            far, weight = self._serve_one(number, asked[:, number], Counter(held))
            left[number] -= float(weight[far <= ms].sum())
        return left

    def _serve_one(
        self, number: int, asked: Floats, held: Counter[NodeId]
    ) -> tuple[Floats, Floats]:
        """Return the latencies in ms, and the requests/s with each, of one deployment."""
        near = self._near.get(number)
        if near is None or near.held != held:
            near = self._near[number] = self._look(number, held)
        if not len(near.rooms):
            return near.ms, near.ms
        load = np.bincount(near.nearest, asked, len(near.rooms))
        if (load <= near.rooms).all():
            return near.ms, asked
        cities = np.flatnonzero(asked > 0)
        requests = asked[cities]
        flow = Flow(requests, requests, near.far[cities], near.rooms, UNSERVED_MS)
        return flow.latencies()

    def _look(self, number: int, held: Counter[NodeId]) -> OpenSites:
        rooms = np.zeros(len(self._world.pops))
        for node_id, count in held.items():
            rooms[self._pop_of[node_id]] += count * self._requests_per_s(number, node_id)
        sites = np.flatnonzero(rooms > 0)
        if not len(sites):
            nothing = np.zeros(0)
            return OpenSites(held, nothing, nothing, sites, nothing)
        far = np.ascontiguousarray(self._far[:, sites])
        nearest = far.argmin(axis=1)
        return OpenSites(held, far, rooms[sites], nearest, far[np.arange(len(far)), nearest])

    def _requests_per_s(self, number: int, node_id: NodeId) -> float:
        """Return the requests/s of a replica at full capacity, without the planner's headroom."""
        profile = self._world.rates[number, self._kind_of[node_id]]
        each_s = PROMPT_TOKENS / profile.prefill_tokens_per_s
        each_s += OUTPUT_TOKENS / profile.decode_tokens_per_s
        return 1.0 / each_s
