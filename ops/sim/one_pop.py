"""Replica choice within one PoP: equal replicas, one router, and handoffs between their nodes.

    python -m ops.sim.one_pop [--data FOLDER] [--requests N] [--replicas N ...] [--load N ...]

Prints the p90 and p99 time to first token over those of the oracle. Here a handoff is often the
last step of the choice, so the router has to learn of it at once.
"""

import argparse
from pathlib import Path

from ops.sim import data
from ops.sim.__main__ import best_oracle
from ops.sim.cases import MOONCAKE, SERVEGEN, SimulationCase, speed_for_load
from ops.sim.measure import summarize
from ops.sim.run import simulate
from ops.sim.traces import TraceSlice
from ops.sim.world import LOCAL_RTT_MS, ReplicaSite, RoutingWorld, SimulatedModel


def one_pop(model: SimulatedModel, replicas: int) -> RoutingWorld:
    """Return a world of one PoP with equal replicas, whose rates are those of their profile."""
    sites = [
        ReplicaSite(number, 0, model.large, model.large.prefill_tokens_per_s)
        for number in range(replicas)
    ]
    return RoutingWorld(("one",), (1.0,), ((LOCAL_RTT_MS,),), tuple(sites))


def print_row(
    case: SimulationCase, folder: Path, requests_max: int, replicas: int, load: int
) -> None:
    """Run our choice and the oracle once, and print their figures."""
    requests = case.read(folder / case.path, TraceSlice(requests_max, case.skip, 0))
    world = one_pop(case.model, replicas)
    speed = speed_for_load(load / 100, world, requests, case.cached_share)
    oracle = best_oracle(world, requests, speed)
    ours = summarize("ours", simulate(world, requests, speed, 1.0, "ours"))
    print(
        f"| {case.name} | {replicas} | {load} % | {oracle.p90_ms:.0f} | {ours.p90_ms:.0f} "
        f"| {ours.p90_ms / oracle.p90_ms:.2f} | {ours.p99_ms / oracle.p99_ms:.2f} "
        f"| {ours.hit - oracle.hit:+.1f} |",
        flush=True,
    )


def main() -> None:
    """Print one row for each trace, number of replicas and load."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.one_pop")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--load", type=int, nargs="*", default=[80, 95])
    arguments = parser.parse_args()
    print("| trace | replicas | load | oracle p90 ms | ours p90 ms | p90 | p99 | hit, points |")
    print("|---|---|---|---|---|---|---|---|")
    for case in (MOONCAKE, SERVEGEN):
        for replicas in arguments.replicas:
            for load in arguments.load:
                print_row(case, data.folder(arguments.data), arguments.requests, replicas, load)


if __name__ == "__main__":
    main()
