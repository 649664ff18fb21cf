"""Other ways of placing, for comparison: what each holds, and how its users are served.

    python -m ops.sim.compare --data ../shared/data

Everything everywhere: each PoP takes a replica of every model, the most popular first, while it has
room, then further ones in proportion to what is asked there. By popularity: the most popular model
first, seats where most is asked until its peak is carried. Weekly mean: this planner, once, on the
mean of the week.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np

from isochrone.wire.ids import ClusterId, Generation, NodeId
from ops.sim.optimality_gap import run_search
from ops.sim.planet import DAY, FIRST, HOUR
from ops.sim.planet_world import PlanetWorld, demand_rows, draw, world_parser
from ops.sim.served import Users
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import ClusterState, PopDistance
from scheduler.decide.placement.fleet.slots import replica_memory_bytes, residency_allows
from scheduler.decide.placement.search.draft import PlacementDraft

Held = dict[int, list[NodeId]]
SAMPLED: Final = tuple(range(DAY, 2 * DAY, 3 * HOUR))

GOAL_MS: Final = 21.4
"""What is farther counts as far: 5 % over the p90 of everything everywhere."""

SIZES_GIB: Final = (20.0, 250.0)
SIZE_NAMES: Final = ("small", "middle", "large")


class Devices:
    """Memory left on each device, for placing without a planner."""

    def __init__(self, world: PlanetWorld) -> None:
        self.world = world
        self._free = {n.node_id: [d.memory_bytes for d in n.devices] for n in world.nodes}
        self._nodes: dict[str, list[NodeId]] = defaultdict(list)
        for node in world.nodes:
            self._nodes[node.pop].append(node.node_id)
        self.used = 0

    def seat(self, number: int, pop: str) -> NodeId | None:
        """Take the tightest fit in a PoP for one replica of a deployment."""
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


def everything_everywhere(world: PlanetWorld, peak: Floats) -> tuple[Held, int]:
    """Fill every PoP with one of each model, then with more of what is asked."""
    seats: Held = defaultdict(list)
    devices = Devices(world)
    pops = {pop.pop: (number, pop) for number, pop in enumerate(world.pops)}
    held = sorted({node.pop for node in world.nodes})
    for again in range(3):
        for name in held:
            place, pop = pops[name]
            order = np.argsort(-peak[place]) if again else np.arange(len(world.deployments))
            for number in order:
                if residency_allows(world.deployments[number].policy, pop):
                    node_id = devices.seat(int(number), name)
                    if node_id:
                        seats[int(number)].append(node_id)
    return seats, devices.used


def by_popularity(world: PlanetWorld, peak: Floats) -> tuple[Held, int]:
    """Give the most popular model seats where most is asked, until its peak is carried."""
    seats: Held = defaultdict(list)
    devices = Devices(world)
    pops = {pop.pop: number for number, pop in enumerate(world.pops)}
    nodes = {node.node_id: node for node in world.nodes}
    held = sorted({node.pop for node in world.nodes}, key=lambda pop: pops[pop])
    for number in np.argsort(-peak.sum(axis=0)):
        wanted, policy = float(peak[:, number].sum()) / 0.7, world.deployments[number].policy
        order = sorted(held, key=lambda pop: -peak[pops[pop], number])
        refused: set[str] = set()
        while wanted > 0 and len(refused) < len(order):
            for pop in order:
                if wanted <= 0:
                    break
                if pop in refused:
                    continue
                may = residency_allows(policy, world.pops[pops[pop]])
                node_id = devices.seat(int(number), pop) if may else None
                if node_id is None:
                    refused.add(pop)
                    continue
                seats[int(number)].append(node_id)
                rate = world.rates[int(number), nodes[node_id].devices[0].device_class]
                wanted -= 1 / (700 / rate.prefill_tokens_per_s + 250 / rate.decode_tokens_per_s)
    return seats, devices.used


def nothing_held(
    world: PlanetWorld, demand: Floats, distances: tuple[PopDistance, ...] = ()
) -> ClusterState:
    """Return the picture of a fleet that is still empty; `distances` replace the true ones."""
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


def planned(
    world: PlanetWorld, demand: Floats, distances: tuple[PopDistance, ...] = ()
) -> tuple[Held, int, PlacementDraft]:
    """Place by the production planner, from an empty fleet."""
    draft, _ = run_search(nothing_held(world, demand, distances), FIRST)
    seats: Held = defaultdict(list)
    used = 0
    for state in draft.states:
        for replica in state.replicas:
            if replica.slot:
                seats[int(state.deployment_id[1:])].append(replica.slot.leader.node_id)
                used += state.needs.memory_bytes
    return seats, used, draft


def fared(world: PlanetWorld, held: Held, memory_bytes: int) -> dict[str, float]:
    """Return what a way of placing holds, and how eight hours of a day are served by it."""
    users = Users(world)
    rows = [users.serve(world.requests(minute), held, set()) for minute in SAMPLED]
    asked = [row.asked_per_s for row in rows]

    def mean(values: list[float], digits: int) -> float:
        return round(float(np.average(values, weights=asked)), digits)

    far = np.sum([users.beyond(world.requests(m), held, GOAL_MS) for m in SAMPLED], axis=0)
    sizes = np.digitize([model.weights_bytes / GIB for model in world.models], SIZES_GIB)
    return {
        "replicas": sum(len(nodes) for nodes in held.values()),
        "memory_tib": round(memory_bytes / 2**40, 1),
        "served": mean([row.served_share for row in rows], 4),
        "rtt_mean_ms": mean([row.rtt_mean_ms for row in rows], 1),
        "rtt_p90_ms": mean([row.rtt_p90_ms for row in rows], 1),
        "rtt_p90_all_ms": mean([row.rtt_p90_all_ms for row in rows], 1),
    } | {
        f"far_percent_{name}": round(100 * float(np.sum(far[sizes == number])) / sum(asked), 2)
        for number, name in enumerate(SIZE_NAMES)
    }


def peak_of_the_day(world: PlanetWorld) -> Floats:
    """Return the most of each hour of the day that is sampled, by city and deployment."""
    hours = [world.requests(DAY + hour * HOUR) for hour in range(24)]
    return np.asarray(np.maximum.reduce(hours), dtype=np.float64)


def compared(world: PlanetWorld) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each way of placing with its memory and how it serves."""
    peak = peak_of_the_day(world)
    mean = np.mean([world.requests(hour * HOUR) for hour in range(0, 168, 3)], axis=0)
    yield "planner", fared(world, *planned(world, peak)[:2])
    yield "everything everywhere", fared(world, *everything_everywhere(world, peak))
    yield "by popularity", fared(world, *by_popularity(world, peak))
    yield "weekly mean", fared(world, *planned(world, mean)[:2])


def main() -> None:
    """Compare, a line each."""
    parser = world_parser(__doc__)
    given = parser.parse_args()
    for name, row in compared(draw(given.data, given.seed)):
        print(f"{name:24}", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
