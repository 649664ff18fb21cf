"""How users are served by what is warm: the same flows for every way of placing compared."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from isochrone.wire.ids import NodeId
from isochrone.wire.report import ReplicaState
from ops.sim.planet_world import OUTPUT_TOKENS, PROMPT_TOKENS, World
from scheduler.decide.flow import Floats, Flow
from scheduler.decide.score import UNSERVED_MS, Distances

if TYPE_CHECKING:
    from ops.sim.planet import Planet

Seats = Mapping[int, Iterable[NodeId]]
"""By the number of a deployment, the node of each warm replica."""


class Served(NamedTuple):
    """What users got in one minute."""

    asked_per_s: float
    served_share: float
    rtt_mean_ms: float
    rtt_p50_ms: float
    rtt_p90_ms: float


def read_seats(planet: "Planet") -> Seats:
    """Return what is warm in a simulated fleet."""
    seats: dict[int, list[NodeId]] = defaultdict(list)
    for placement in planet.placements.values():
        if placement.state is ReplicaState.WARM:
            seats[int(placement.deployment_id[1:])].append(placement.node_id)
    return seats


def serve(world: World, asked: Floats, seats: Seats, lost: set[NodeId]) -> Served:
    """Serve a minute's requests, each by the nearest warm replica with room."""
    pops = {pop.pop: number for number, pop in enumerate(world.pops)}
    nodes = {node.node_id: node for node in world.nodes}
    far = Distances(world.pops, ()).ms
    ms_all, weight_all = [], []
    for number, held in seats.items():
        rooms = np.zeros(len(world.pops))
        for node_id in held:
            if node_id not in lost:
                node = nodes[node_id]
                kind = node.devices[0].device_class
                rooms[pops[node.pop]] += _requests_per_s(world, number, kind)
        cities = np.flatnonzero(asked[:, number] > 0)
        open_sites = np.flatnonzero(rooms > 0)
        if not len(cities) or not len(open_sites):
            continue
        requests = asked[cities, number]
        flow = Flow(
            requests, requests, far[np.ix_(cities, open_sites)], rooms[open_sites], UNSERVED_MS
        )
        ms, weight = flow.latencies()
        ms_all.append(ms)
        weight_all.append(weight)
    ms, weight = np.concatenate(ms_all), np.concatenate(weight_all)
    order = np.argsort(ms)
    share = np.cumsum(weight[order]) / weight.sum()
    total = float(asked.sum())
    return Served(
        asked_per_s=round(total, 1),
        served_share=round(float(weight.sum()) / total, 5),
        rtt_mean_ms=round(float(ms @ weight / weight.sum()), 2),
        rtt_p50_ms=round(float(ms[order][np.searchsorted(share, 0.5)]), 2),
        rtt_p90_ms=round(float(ms[order][np.searchsorted(share, 0.9)]), 2),
    )


def _requests_per_s(world: World, number: int, kind: str) -> float:
    """Return what a replica serves at its full capacity, without the planner's headroom."""
    profile = world.rates[number, kind]
    each_s = PROMPT_TOKENS / profile.prefill_tokens_per_s
    each_s += OUTPUT_TOKENS / profile.decode_tokens_per_s
    return 1.0 / each_s
