"""Measures the gain of routers that know more of the replicas' prefix caches: cache_knowledge.md.

    python -m ops.sim.cache_knowledge [--data FOLDER] [--requests N] [--draws N ...] [--age S ...]

Our own choice with five kinds of knowledge, over the oracle. `estimate`: a router's own history
alone; it assumes the size of each cache, and learns it from answers. `reach`: load reports also say
since when a cache has all that was used, which is what routers do. `events`: the same, as a node
computes it for an engine that says only which blocks it stores and evicts. `prefixes`: they say
instead which prefixes that several prompts have in common were stored and evicted. `exact`: every
cache, and every prompt that waits there, as it is now.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from ops.sim import data
from ops.sim.cache_policies import PrefixesPolicy
from ops.sim.event_reach import EventReplica
from ops.sim.hard_table import ORACLES, PreparedWorld, TableOptions, best_of, prepare
from ops.sim.hard_worlds import WORLDS
from ops.sim.measure import RunFigures, summarize
from ops.sim.replica import SimulatedReplica
from ops.sim.run import Simulation

POLICIES: Final = {
    "estimate": "estimate",
    "reach": "ours",
    "events": "ours",
    "prefixes": "prefixes",
    "exact": "exact",
}
"""The name of the policy, by kind of knowledge."""

WORLD_NAMES: Final = (
    "16 cities, cache x 1/8, Mooncake",
    "16 cities, cache x 1/4, Mooncake",
    "16 cities, cache x 1, Mooncake",
    "one PoP of 8, cache x 1/8, Mooncake",
    "16 cities, 70B of today, Mooncake",
    "16 cities, cache x 1/8, ServeGen",
    "16 cities, 70B of today, ServeGen",
)
LOAD: Final = 95
REQUESTS: Final = 2000
DRAWS: Final = (71, 72)
REPORT_FIELD_BYTES: Final = 9
"""`;c=` and six digits."""


class KnowledgeRow(NamedTuple):
    """One kind of knowledge in one world and draw, over the oracle."""

    p50: float
    p90: float
    p99: float
    hit_points: float
    bytes_per_s: float
    """The rate of reports to one router, about all replicas."""


def run_row(
    prepared: PreparedWorld, oracle: RunFigures, knowledge: str, age_s: float
) -> KnowledgeRow:
    """Run once and compare with the oracle."""
    speed = prepared.speed(LOAD)
    kind = EventReplica if knowledge == "events" else SimulatedReplica
    fleet, policy = prepared.fleet, POLICIES[knowledge]
    run = Simulation(fleet, prepared.requests, speed, age_s, policy, replica_kind=kind)
    figures = summarize(knowledge, run.run())
    reports_per_s = len(prepared.fleet.sites) / (age_s / 2)
    bytes_per_s = REPORT_FIELD_BYTES * reports_per_s if policy == "ours" else 0.0
    heard = [policy.bytes_heard for policy in run.policies if isinstance(policy, PrefixesPolicy)]
    if heard:
        bytes_per_s = fmean(heard) / run.now_s
    return KnowledgeRow(
        figures.p50_ms / oracle.p50_ms,
        figures.p90_ms / oracle.p90_ms,
        figures.p99_ms / oracle.p99_ms,
        figures.hit - oracle.hit,
        bytes_per_s,
    )


def print_rows(world: str, age_s: float, rows: dict[str, list[KnowledgeRow]]) -> None:
    """Print the mean of all draws for each kind of knowledge."""
    for knowledge, drawn in rows.items():
        mean = KnowledgeRow(*(fmean(values) for values in zip(*drawn, strict=True)))
        cost = "-" if knowledge == "exact" else f"{mean.bytes_per_s:.0f}"
        print(
            f"| {world} | {age_s:g} | {knowledge} | {mean.p50:.2f} | {mean.p90:.2f} "
            f"| {mean.p99:.2f} | {mean.hit_points:+.1f} | {cost} |",
            flush=True,
        )


def run_world(
    folder: Path,
    world: str,
    requests: int,
    draws: Sequence[int],
    age_s: float,
    kinds: Sequence[str] = tuple(POLICIES),
) -> None:
    """Run one world at one age of information, with all draws."""
    (hard,) = (hard for hard in WORLDS if hard.name == world)
    rows: dict[str, list[KnowledgeRow]] = {}
    for draw in draws:
        prepared = prepare(hard, TableOptions(folder, requests, draw, (LOAD,), (age_s,), ()))
        oracle = best_of([prepared.run(name, LOAD, 1.0, draw) for name in ORACLES])
        for knowledge in kinds:
            row = run_row(prepared, oracle, knowledge, age_s)
            rows.setdefault(knowledge, []).append(row)
    print_rows(world, age_s, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.cache_knowledge")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--draws", type=int, nargs="*", default=list(DRAWS))
    parser.add_argument("--age", type=float, nargs="*", default=[1.0], help="in seconds")
    parser.add_argument("--world", default="", help="only worlds with this in their name")
    parser.add_argument("--knowledge", nargs="*", choices=tuple(POLICIES), default=tuple(POLICIES))
    arguments = parser.parse_args()
    print("| world | age, s | knowledge | p50 | p90 | p99 | hits, points | bytes/s to a router |")
    print("|---|---|---|---|---|---|---|---|")
    for world in WORLD_NAMES:
        if arguments.world in world:
            for age_s in arguments.age:
                run_world(
                    data.folder(arguments.data),
                    world,
                    arguments.requests,
                    arguments.draws,
                    age_s,
                    arguments.knowledge,
                )


if __name__ == "__main__":
    main()
