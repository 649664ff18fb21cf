"""The CPU time of placement plans: the first plan of a fleet, and the plans of each minute.

    python -m ops.bench.plan [--data ../shared/data] [--minutes 60] [--snapshot FILE]

The world of `ops/sim/planet_world.py` is reduced to its first cities and models. The first plan
places everything on an empty fleet. Then each minute is planned as placement does it, for the
higher of the current demand and that within the hour, and the moves are carried out. With
--snapshot, the plan of a cluster state saved by `isochrone plan --save` is timed.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import ClusterId, Generation, NodeId
from ops.sim.planet_world import MODELS, PlanetWorld, demand_rows, draw, world_parser
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.cluster import ClusterState, PopDistance
from scheduler.decide.placement import plan_prefetch
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.whatif.simulation import ClusterSnapshot, apply_plan
from scheduler.planner.garbage import GarbageBetweenAnswers


class WorldSize(NamedTuple):
    """Cities with demand, how many of them have GPUs, and deployments."""

    cities: int
    gpu_cities: int
    deployments: int


SIZES: Final = (
    WorldSize(20, 15, 20),
    WorldSize(80, 50, 50),
    WorldSize(335, 190, 100),
    WorldSize(335, 190, 1_000),
)

BEGINS_MIN: Final = 8 * 60
HOUR_MIN: Final = 60
LATER_MIN: Final = 180
DAY_S: Final = 86_400.0
FIRST: Final = PlanLimits(starts_max=10**6, endings_max=10**6, effort=0)


class PlanTiming(NamedTuple):
    """The CPU time and the moves of one plan, and the time to collect its garbage afterwards."""

    took_s: float
    moves: int
    garbage_s: float = 0.0


def cut(world: PlanetWorld, size: WorldSize) -> ClusterState:
    """Return a part of the world without demand.

    The round trips that each city has measured to the cities with GPUs follow from geography.
    """
    cities, gpu_cities, deployments = size
    held = {pop.pop for pop in world.pops[:gpu_cities]}
    far = Distances(world.pops, ())
    return ClusterState(
        cluster_id=ClusterId("planet"),
        generation=Generation(1),
        acting_for_s=1e6,
        pops=world.pops[:cities],
        nodes=tuple(node for node in world.nodes if node.pop in held),
        models=world.models[:deployments],
        deployments=world.deployments[:deployments],
        profiles=world.profiles,
        distances=tuple(
            PopDistance(from_pop=one.pop, to_pop=other.pop, rtt_ms=far.between(one.pop, other.pop))
            for one in world.pops[:cities]
            for other in world.pops[:gpu_cities]
        ),
    )


def asked_at(world: PlanetWorld, cluster: ClusterState, *minutes: int) -> ClusterState:
    """Return the cluster with the highest demand of these minutes."""
    asked = np.maximum.reduce([world.requests(minute) for minute in minutes])
    asked[len(cluster.pops) :, :] = 0.0
    asked[:, len(cluster.deployments) :] = 0.0
    return msgspec.structs.replace(cluster, demand=demand_rows(world, asked))


def planned(
    cluster: ClusterState, limits: PlanLimits | None = None
) -> tuple[PlanTiming, ClusterState]:
    """Make a plan, measure its CPU time, and carry it out."""
    began = process_time()
    decided = plan_deployments(cluster, limits)
    took_s = process_time() - began
    moves = len(decided.starts) + len(decided.endings)
    return PlanTiming(took_s, moves), apply_plan(cluster, decided)


def with_weights(cluster: ClusterState) -> ClusterState:
    """Return the cluster with the weights of all placements on the disks of their nodes."""
    digests = {model.model_id: model.artifact.digest for model in cluster.models}
    served = {one.deployment_id: digests[one.model_id] for one in cluster.deployments}
    held: dict[NodeId, set[str]] = defaultdict(set)
    for placement in cluster.placements:
        held[placement.node_id].add(served[placement.deployment_id])
    nodes = tuple(
        msgspec.structs.replace(node, artifacts=tuple(sorted(held[node.node_id])))
        for node in cluster.nodes
    )
    return msgspec.structs.replace(cluster, nodes=nodes)


def settled(cluster: ClusterState) -> ClusterState:
    """Return the cluster with placements a day old: no deployment is still laid out."""
    placements = tuple(msgspec.structs.replace(p, age_s=DAY_S) for p in cluster.placements)
    return msgspec.structs.replace(cluster, placements=placements)


def minute_by_minute(
    world: PlanetWorld, cluster: ClusterState, minutes: int
) -> Iterator[PlanTiming]:
    """Plan each minute of a morning, from the result of the minute before."""
    garbage = GarbageBetweenAnswers()
    for minute in range(BEGINS_MIN, BEGINS_MIN + minutes):
        turn, cluster = planned(asked_at(world, cluster, minute, minute + HOUR_MIN))
        began = process_time()
        garbage.collect()
        yield turn._replace(garbage_s=process_time() - began)


def row_of(world: PlanetWorld, cluster: ClusterState, minutes: int) -> str:
    """Return one size's row of the table."""
    peak = asked_at(world, cluster, BEGINS_MIN, BEGINS_MIN + HOUR_MIN)
    # A warm-up: the first call includes one-time costs of Python and numpy.
    planned(peak, FIRST)
    first, seated = planned(peak, FIRST)
    seated = settled(with_weights(seated))
    turns = list(minute_by_minute(world, seated, minutes))
    began = process_time()
    plan_prefetch(asked_at(world, seated, BEGINS_MIN, BEGINS_MIN + LATER_MIN), 60.0 * LATER_MIN)
    prefetch_s = process_time() - began
    took = [turn.took_s for turn in turns]
    devices = sum(len(node.devices) for node in cluster.nodes)
    return (
        f"| {len(cluster.pops)} | {len(cluster.nodes)} | {devices} | {len(cluster.deployments)} "
        f"| {len(peak.demand)} | {len(seated.placements)} | {first.took_s:.2f} "
        f"| {np.median(took):.3f} | {np.percentile(took, 99):.3f} "
        f"| {max(turn.garbage_s for turn in turns):.3f} "
        f"| {sum(turn.moves for turn in turns)} | {prefetch_s:.2f} |"
    )


def timed(path: Path, times: int = 5) -> str:
    """Return a line with the CPU time of the plan of a saved cluster."""
    cluster = msgspec.json.decode(path.read_bytes(), type=ClusterSnapshot).cluster
    turns = [planned(cluster)[0] for _ in range(times)]
    return (
        f"{path.name}: {len(cluster.nodes)} nodes, {len(cluster.demand)} demand rows, "
        f"{min(t.took_s for t in turns):.3f} s at best of {times}, {turns[0].moves} moves"
    )


def main() -> None:
    """Print the table, or the line of a saved cluster."""
    parser = world_parser(__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--largest", type=int, default=len(SIZES), help="only the N largest sizes")
    parser.add_argument("--snapshot", type=Path)
    given = parser.parse_args()
    if given.snapshot is not None:
        print(timed(given.snapshot))
        return
    print(
        "| cities | nodes | devices | deployments | demand rows | replicas | first plan s "
        "| each minute s, median | p99 | garbage after a plan s, longest "
        "| moves in all | prefetch s |"
    )
    print("|---|" + "---|" * 11)
    for size in SIZES[-given.largest :]:
        world = draw(given.data, given.seed, max(MODELS, size.deployments))
        print(row_of(world, cut(world, size), given.minutes), flush=True)


if __name__ == "__main__":
    main()
