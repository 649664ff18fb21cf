"""Compare the planner with other placements: what each holds, and how its users are served.

    python -m ops.sim.compare --data ../shared/data

Everything everywhere: each PoP gets a replica of every model while memory is left, the most popular
first, then further ones by the demand there. By popularity: the most popular model first, with
replicas where its demand is highest until they carry its peak. Weekly mean: our planner, once, on
the mean demand of the week.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np

from isochrone.wire.ids import ClusterId, Generation, NodeId
from ops.sim.optimality_gap import run_search
from ops.sim.planet import DAY, FIRST, HOUR
from ops.sim.planet_world import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PlanetWorld,
    demand_rows,
    draw,
    world_parser,
)
from ops.sim.served import UserTraffic
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import ClusterState, PopDistance
from scheduler.decide.placement.fleet.slots import replica_memory_bytes, residency_allows
from scheduler.decide.placement.search.draft import PlacementDraft

NodesByDeployment = dict[int, list[NodeId]]
SAMPLED_MINUTES: Final = tuple(range(DAY, 2 * DAY, 3 * HOUR))

TARGET_UTILIZATION: Final = 0.7
"""Share of its capacity up to which a replica placed by popularity is loaded."""

GOAL_MS: Final = 21.4
"""Requests served from beyond this count as far: 5 % over the p90 of everything everywhere."""

SIZES_GIB: Final = (20.0, 250.0)
SIZE_NAMES: Final = ("small", "middle", "large")


class FreeDevices:
    """Free memory of each device, for placing without a planner."""

    def __init__(self, world: PlanetWorld) -> None:
        self.world = world
        self._free = {n.node_id: [d.memory_bytes for d in n.devices] for n in world.nodes}
        self._nodes: dict[str, list[NodeId]] = defaultdict(list)
        for node in world.nodes:
            self._nodes[node.pop].append(node.node_id)
        self.used = 0

    def place(self, number: int, pop: str) -> NodeId | None:
        """Place a replica of a deployment in a PoP by best fit; return its node, or None."""
        deployment, model = self.world.deployments[number], self.world.models[number]
        needed, count = replica_memory_bytes(model, deployment.engine), deployment.engine.devices
        best: tuple[int, NodeId, list[int]] | None = None
        for node_id in self._nodes[pop]:
            free = self._free[node_id]
            fitting = sorted((left, i) for i, left in enumerate(free) if left >= needed)[:count]
            if len(fitting) == count and (best is None or fitting[0][0] < best[0]):
                best = (fitting[0][0], node_id, [i for _, i in fitting])
        if best is None:
            return None
        for index in best[2]:
            self._free[best[1]][index] -= needed
        self.used += needed * count
        return best[1]


def place_everything_everywhere(world: PlanetWorld, peak: Floats) -> tuple[NodesByDeployment, int]:
    """Fill every PoP with one replica of each model, then with more by demand.

    Return the nodes of each deployment's replicas, and the memory used in bytes.
    """
    nodes_of: NodesByDeployment = defaultdict(list)
    devices = FreeDevices(world)
    pops = {pop.pop: (number, pop) for number, pop in enumerate(world.pops)}
    pops_with_nodes = sorted({node.pop for node in world.nodes})
    for round_number in range(3):
        for name in pops_with_nodes:
            pop_number, pop = pops[name]
            by_demand = np.argsort(-peak[pop_number])
            order = by_demand if round_number else np.arange(len(world.deployments))
            for number in order:
                if residency_allows(world.deployments[number].policy, pop):
                    node_id = devices.place(int(number), name)
                    if node_id:
                        nodes_of[int(number)].append(node_id)
    return nodes_of, devices.used


def place_by_popularity(world: PlanetWorld, peak: Floats) -> tuple[NodesByDeployment, int]:
    """Place the most popular model first, where its demand is highest, until it carries its peak.

    Return the nodes of each deployment's replicas, and the memory used in bytes.
    """
    nodes_of: NodesByDeployment = defaultdict(list)
    devices = FreeDevices(world)
    pops = {pop.pop: number for number, pop in enumerate(world.pops)}
    nodes = {node.node_id: node for node in world.nodes}
    pops_with_nodes = sorted({node.pop for node in world.nodes}, key=lambda pop: pops[pop])
    for number in np.argsort(-peak.sum(axis=0)):
        needed_per_s = float(peak[:, number].sum()) / TARGET_UTILIZATION
        policy = world.deployments[number].policy
        order = sorted(pops_with_nodes, key=lambda pop: -peak[pops[pop], number])
        full: set[str] = set()
        while needed_per_s > 0 and len(full) < len(order):
            for pop in order:
                if needed_per_s <= 0:
                    break
                if pop in full:
                    continue
                is_allowed = residency_allows(policy, world.pops[pops[pop]])
                node_id = devices.place(int(number), pop) if is_allowed else None
                if node_id is None:
                    full.add(pop)
                    continue
                nodes_of[int(number)].append(node_id)
                rate = world.rates[int(number), nodes[node_id].devices[0].device_class]
                prefill_s = PROMPT_TOKENS / rate.prefill_tokens_per_s
                needed_per_s -= 1 / (prefill_s + OUTPUT_TOKENS / rate.decode_tokens_per_s)
    return nodes_of, devices.used


def empty_fleet(
    world: PlanetWorld, demand: Floats, distances: tuple[PopDistance, ...] = ()
) -> ClusterState:
    """Return the cluster state of an empty fleet; `distances` replace the true ones."""
    return ClusterState(
        cluster_id=ClusterId("planet"),
        generation=Generation(1),
        acting_for_s=1e6,
        pops=world.pops,
        nodes=world.nodes,
        models=world.models,
        deployments=world.deployments,
        demand=demand_rows(world, demand),
        distances=distances,
        profiles=world.profiles,
    )


def place_by_planner(
    world: PlanetWorld, demand: Floats, distances: tuple[PopDistance, ...] = ()
) -> tuple[NodesByDeployment, int, PlacementDraft]:
    """Place by the production search, from an empty fleet.

    Return the nodes of each deployment's replicas, the memory used in bytes, and the draft.
    """
    draft, _ = run_search(empty_fleet(world, demand, distances), FIRST)
    nodes_of: NodesByDeployment = defaultdict(list)
    used = 0
    for state in draft.states:
        for replica in state.replicas:
            if replica.slot:
                node_id = replica.slot.leader.node_id
                nodes_of[int(state.deployment_id[1:])].append(node_id)
                used += state.needs.memory_bytes
    return nodes_of, used, draft


def evaluate(
    world: PlanetWorld, placement: NodesByDeployment, memory_bytes: int
) -> dict[str, float]:
    """Return the size of a placement, and how it serves every third hour of a day."""
    users = UserTraffic(world)
    rows = [users.serve(world.requests(minute), placement, set()) for minute in SAMPLED_MINUTES]
    weights = [row.asked_per_s for row in rows]

    def mean(values: list[float], digits: int) -> float:
        return round(float(np.average(values, weights=weights)), digits)

    beyond = [users.beyond(world.requests(m), placement, GOAL_MS) for m in SAMPLED_MINUTES]
    far = np.sum(beyond, axis=0)
    sizes = np.digitize([model.weights_bytes / GIB for model in world.models], SIZES_GIB)
    return {
        "replicas": sum(len(nodes) for nodes in placement.values()),
        "memory_tib": round(memory_bytes / 2**40, 1),
        "served": mean([row.served_share for row in rows], 4),
        "rtt_mean_ms": mean([row.rtt_mean_ms for row in rows], 1),
        "rtt_p90_ms": mean([row.rtt_p90_ms for row in rows], 1),
        "rtt_p90_all_ms": mean([row.rtt_p90_all_ms for row in rows], 1),
    } | {
        f"far_percent_{name}": round(100 * float(np.sum(far[sizes == number])) / sum(weights), 2)
        for number, name in enumerate(SIZE_NAMES)
    }


def daily_peak(world: PlanetWorld) -> Floats:
    """Return the highest demand of the hours of one day, by city and deployment."""
    hours = [world.requests(DAY + hour * HOUR) for hour in range(24)]
    return np.asarray(np.maximum.reduce(hours), dtype=np.float64)


def compare_placements(world: PlanetWorld) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and results of each placement."""
    peak = daily_peak(world)
    mean = np.mean([world.requests(hour * HOUR) for hour in range(0, 168, 3)], axis=0)
    yield "planner", evaluate(world, *place_by_planner(world, peak)[:2])
    yield "everything everywhere", evaluate(world, *place_everything_everywhere(world, peak))
    yield "by popularity", evaluate(world, *place_by_popularity(world, peak))
    yield "weekly mean", evaluate(world, *place_by_planner(world, mean)[:2])


def main() -> None:
    """Print one line per placement."""
    parser = world_parser(__doc__)
    arguments = parser.parse_args()
    for name, row in compare_placements(draw(arguments.data, arguments.seed)):
        print(f"{name:24}", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
