"""Measures the cost of running a router as several processes, each with its own fleet state.

    python -m ops.sim.processes [--data FOLDER] [--load N] [--age S] [--count N ...]

Each PoP's router is split into several processes, each with its own `FleetState`: without sharing,
and sharing once a second which prompts were read where, as real processes do. Each request reaches
a random process, also the next turn of a session. This is the worst case, because a client that
keeps its connection keeps its process.
"""

import argparse
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Final

from ops.sim import data
from ops.sim.cases import CASES, case_world, speed_for_load
from ops.sim.measure import summarize
from ops.sim.run import simulate
from ops.sim.traces import TraceRequest, TraceSlice
from ops.sim.world import RoutingWorld
from router.decide.caches.affinity import hash64

REQUESTS: Final = 4000
COUNTS: Final = (1, 2, 4, 8)


def split_routers(world: RoutingWorld, count: int) -> RoutingWorld:
    """Return the world with `count` routers in place of each one."""
    pops = range(len(world.pops))
    return world._replace(
        pops=tuple(f"{pop}.{n}" for pop, n in product(world.pops, range(count))),
        demand=tuple(share / count for share in world.demand for _ in range(count)),
        rtt_ms=tuple(
            tuple(world.rtt_ms[a][b] for b in pops for _ in range(count))
            for a in pops
            for _ in range(count)
        ),
        sites=tuple(site._replace(pop=site.pop * count) for site in world.sites),
    )


def scatter_requests(
    world: RoutingWorld, requests: Sequence[TraceRequest], count: int
) -> list[TraceRequest]:
    """Return the requests, each at a random process of its own city."""
    ends = list(accumulate(world.demand))
    found = []
    for request in requests:
        pop = next((n for n, end in enumerate(ends) if request.place < end), len(ends) - 1)
        process = hash64(f"p{request.number}") % count
        begins = ends[pop] - world.demand[pop]
        place = begins + world.demand[pop] * (process + 0.5) / count
        found.append(request._replace(place=place))
    return found


def compare(folder: Path, load: int, age_s: float, counts: Sequence[int]) -> None:
    """Print one row for each trace and count."""
    print("| trace | processes | | p50 ms | p90 ms | hit % | out of PoP % |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        requests = case.read(folder / case.path, TraceSlice(REQUESTS))
        world = case_world(case, folder)
        speed = speed_for_load(load / 100, world, requests, case.cached_share)
        for count in counts:
            scattered, split = scatter_requests(world, requests, count), split_routers(world, count)
            for how, together in (("apart", 1), ("sharing", count))[: 1 + (count > 1)]:
                outcome = simulate(split, scattered, speed, age_s, "ours", together)
                figures = summarize("ours", outcome)
                print(
                    f"| {case.name} | {count} | {how} | {figures.p50_ms:.0f} "
                    f"| {figures.p90_ms:.0f} "
                    f"| {figures.hit:.1f} | {figures.away:.0f} |",
                    flush=True,
                )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.processes")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--load", type=int, default=80, help="in percent")
    parser.add_argument("--age", type=float, default=1.0, help="of information, in seconds")
    parser.add_argument("--count", type=int, nargs="*", default=list(COUNTS))
    arguments = parser.parse_args()
    compare(data.folder(arguments.data), arguments.load, arguments.age, arguments.count)


if __name__ == "__main__":
    main()
