"""Run every hard world at every load and age of information, and write one table: `make sim`.

    python -m ops.sim.hard_table [--data FOLDER] [--out FILE.csv] [--table FILE.md] [--processes N]
        [--requests N] [--draw N] [--world WORD] [--load N ...] [--age S ...] [--policy NAME ...]
        [--replica flowing|boundaries|stepped]

The oracle does not depend on the age of information. Its figures are the best of ORACLES, each
figure apart. Load counts the hits that the oracle reaches in that world.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing import Pool
from pathlib import Path
from time import process_time
from typing import Final, NamedTuple

from ops.sim import data
from ops.sim.cases import speed_for_load
from ops.sim.hard_report import write_table
from ops.sim.hard_worlds import WORLDS, HardWorld
from ops.sim.measure import PolicyRun, RunFigures, RunSetting, summarize, write_runs
from ops.sim.policy_choice import RIVAL_NAMES
from ops.sim.run import simulate
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld

LOADS: Final = (50, 80, 95)
AGES_S: Final = (0.1, 1.0, 5.0)
ORACLES: Final = tuple(
    f"oracle {charge} {foresight}" for foresight in (0, 1) for charge in (0.0, 0.5, 1.0, 2.0)
)
REQUESTS: Final = 800
DRAW: Final = 71
"""Ranking was tuned with draw 0."""


class TableOptions(NamedTuple):
    """The options of the runs in each world."""

    folder: Path
    requests_max: int
    draw: int
    loads: Sequence[int]
    ages_s: Sequence[float]
    policies: Sequence[str]
    replica_kind: str = "flowing"


class PreparedWorld(NamedTuple):
    """A world with its requests and the hits that an oracle reaches there."""

    hard: HardWorld
    fleet: RoutingWorld
    requests: Sequence[TraceRequest]
    cached_share: float
    replica_kind: str = "flowing"

    def speed(self, load: int) -> float:
        """Return the factor that gives a load in percent."""
        return speed_for_load(load / 100, self.fleet, self.requests, self.cached_share)

    def with_oracle_hits(self, draw: int) -> "PreparedWorld":
        """Return the world with the share of prompts that an oracle finds cached there."""
        hit = self.run(ORACLES[1], 80, 1.0, draw).hit if self.cached_share else 0.0
        return self._replace(cached_share=hit / 100)

    def run(self, policy: str, load: int, age_s: float, draw: int) -> RunFigures:
        """Run one policy and sum it up."""
        speed = self.speed(load)
        losses = self.hard.losses(self.fleet, self.requests[-1].at_s / speed, draw)
        kind = REPLICA_KINDS[self.replica_kind]
        outcome = simulate(
            self.fleet, self.requests, speed, age_s, policy, losses=losses, replica_kind=kind
        )
        return summarize(policy, outcome)


def prepare(hard: HardWorld, options: TableOptions) -> PreparedWorld:
    """Build a world, and measure the share of prompts that an oracle finds cached there."""
    fleet = hard.build(options.folder, options.draw)
    requests = hard.requests(options.folder, options.requests_max, options.draw)
    nominal = PreparedWorld(hard, fleet, requests, hard.case.cached_share, options.replica_kind)
    return nominal.with_oracle_hits(options.draw)


def best_of(runs: Sequence[RunFigures]) -> RunFigures:
    """Return the best of several oracles, each figure apart; the hits are of the best p90."""
    best = min(runs, key=lambda figures: figures.p90_ms)
    return best._replace(
        policy="oracle",
        p50_ms=min(run.p50_ms for run in runs),
        p99_ms=min(run.p99_ms for run in runs),
    )


def run_load(prepared: PreparedWorld, load: int, options: TableOptions) -> Iterator[PolicyRun]:
    """Run one world at one load."""
    draw = options.draw
    oracle = best_of([prepared.run(name, load, 1.0, draw) for name in ORACLES])
    for age_s in options.ages_s:
        setting = RunSetting(
            prepared.hard.name, load, age_s, draw, len(prepared.requests), prepared.speed(load)
        )
        yield PolicyRun(setting, oracle)
        for name in options.policies:
            yield PolicyRun(setting, prepared.run(name, load, age_s, draw))


def run_task(task: tuple[int, int, TableOptions]) -> tuple[list[PolicyRun], float]:
    """Run one world at one load in a process of its own; return also its time in seconds."""
    world, load, options = task
    began_s = process_time()
    runs = list(run_load(prepare(WORLDS[world], options), load, options))
    return runs, process_time() - began_s


def print_cells(runs: Sequence[PolicyRun], took_s: float) -> None:
    """Print our figures over the oracle's."""
    oracle = runs[0].figures
    for setting, ours in runs:
        if ours.policy != "oracle":
            print(
                f"{setting.case:38} {setting.load} % {setting.age_s:3g} s {ours.policy:22} "
                f"p50 {ours.p50_ms / oracle.p50_ms:5.2f} p90 {ours.p90_ms / oracle.p90_ms:5.2f} "
                f"p99 {ours.p99_ms / oracle.p99_ms:5.2f} hit {ours.hit - oracle.hit:+5.1f} "
                f"429 {ours.refused}"
            )
    print(
        f"  oracle p90 {oracle.p90_ms:.0f} ms, hit {oracle.hit:.1f} %, {took_s:.0f} s", flush=True
    )


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.hard_table")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--out", type=Path, help="CSV file for all figures")
    parser.add_argument("--table", type=Path, help="Markdown file for the table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each trace, at most")
    parser.add_argument("--draw", type=int, default=DRAW, help="seed of what traces do not have")
    parser.add_argument("--world", default="", help="only worlds with this in their name")
    parser.add_argument("--load", type=int, nargs="*", default=list(LOADS), help="in percent")
    parser.add_argument("--age", type=float, nargs="*", default=list(AGES_S), help="in seconds")
    parser.add_argument("--policy", nargs="*", default=["ours", *RIVAL_NAMES])
    parser.add_argument("--replica", choices=REPLICA_KINDS, default="flowing", help="its model")
    return parser.parse_args()


def main() -> int:
    """Run all worlds, two at a time."""
    arguments = parse_arguments()
    try:
        folder = data.folder(arguments.data)
    except data.NoData as error:
        print(error, file=sys.stderr)
        return 1
    options = TableOptions(
        folder,
        arguments.requests,
        arguments.draw,
        arguments.load,
        arguments.age,
        arguments.policy,
        arguments.replica,
    )
    worlds = [n for n, world in enumerate(WORLDS) if arguments.world in world.name]
    tasks = [(world, load, options) for world, load in product(worlds, arguments.load)]
    runs: list[PolicyRun] = []
    with Pool(arguments.processes) as pool:
        for found, took_s in pool.imap(run_task, tasks):
            print_cells(found, took_s)
            runs += found
    if arguments.out:
        write_runs(arguments.out, runs)
    if arguments.table:
        write_table(arguments.table, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
