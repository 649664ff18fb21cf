"""How users are served by what is warm: the same flows for every way of placing compared.

A deployment whose nearest replicas have room for everyone needs no flow: its users go there. Which
these are is kept for as long as its replicas stay: a minute of the planet takes milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from isochrone.wire.ids import NodeId
from ops.sim.planet_world import OUTPUT_TOKENS, PROMPT_TOKENS, PlanetWorld
from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.placement.score import UNSERVED_MS
from scheduler.decide.placement.search.load_assignment import LoadAssignment

Seats = Mapping[int, Iterable[NodeId]]
"""By the number of a deployment, the node of each warm replica."""


class Served(NamedTuple):
    """What users got in one minute. `rtt_p90_all_ms` counts who is not served as farthest."""

    asked_per_s: float
    served_share: float
    rtt_mean_ms: float
    rtt_p50_ms: float
    rtt_p90_ms: float
    rtt_p90_all_ms: float


class Near(NamedTuple):
    """The open sites of one deployment: where they are, their room, and each city's nearest."""

    held: Counter[NodeId]
    far: Floats
    rooms: Floats
    nearest: Ints
    ms: Floats


class Users:
    """Everybody who asks, in every city."""

    def __init__(self, world: PlanetWorld) -> None:
        self._world = world
        self._far: Floats = Distances(world.pops, ()).ms
        pops = {pop.pop: number for number, pop in enumerate(world.pops)}
        self._pop_of = {node.node_id: pops[node.pop] for node in world.nodes}
        self._kind_of = {node.node_id: node.devices[0].device_class for node in world.nodes}
        self._near: dict[int, Near] = {}

    def serve(self, asked: Floats, seats: Seats, lost: set[NodeId]) -> Served:
        """Serve a minute's requests, each by the nearest warm replica with room."""
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

        return Served(
            asked_per_s=round(total, 1),
            served_share=round(served / total, 5),
            rtt_mean_ms=round(float(ms @ weight / served), 2),
            rtt_p50_ms=percentile(0.5, served),
            rtt_p90_ms=percentile(0.9, served),
            rtt_p90_all_ms=percentile(0.9, total),
        )

    def beyond(self, asked: Floats, seats: Seats, ms: float) -> Floats:
        """Return by deployment the requests/s that are served from farther than `ms`, or not."""
        left: Floats = asked.sum(axis=0)
        for number, held in seats.items():
            far, weight = self._serve_one(number, asked[:, number], Counter(held))
            left[number] -= float(weight[far <= ms].sum())
        return left

    def _serve_one(
        self, number: int, asked: Floats, held: Counter[NodeId]
    ) -> tuple[Floats, Floats]:
        """Return ms and requests/s of all that one deployment serves."""
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
        flow = LoadAssignment(requests, requests, near.far[cities], near.rooms, UNSERVED_MS)
        return flow.latencies()

    def _look(self, number: int, held: Counter[NodeId]) -> Near:
        rooms = np.zeros(len(self._world.pops))
        for node_id, count in held.items():
            rooms[self._pop_of[node_id]] += count * self._requests_per_s(number, node_id)
        sites = np.flatnonzero(rooms > 0)
        if not len(sites):
            nothing = np.zeros(0)
            return Near(held, nothing, nothing, sites, nothing)
        far = np.ascontiguousarray(self._far[:, sites])
        nearest = far.argmin(axis=1)
        return Near(held, far, rooms[sites], nearest, far[np.arange(len(far)), nearest])

    def _requests_per_s(self, number: int, node_id: NodeId) -> float:
        """Return what a replica serves at its full capacity, without the planner's headroom."""
        profile = self._world.rates[number, self._kind_of[node_id]]
        each_s = PROMPT_TOKENS / profile.prefill_tokens_per_s
        each_s += OUTPUT_TOKENS / profile.decode_tokens_per_s
        return 1.0 / each_s
