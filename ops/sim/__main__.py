"""Run the simulation: every case at every load, age of information and draw, with all policies.

    python -m ops.sim [--held-out] [--data FOLDER] [--requests N] [--out FILE.csv] [--trace WORD]
        [--draw N ...] [--load N ...] [--age S ...] [--policy NAME ...]

A draw decides what no trace has: the real rate of each replica, the city of each session, and
ServeGen's conversations. `--held-out` runs parts of traces, and traces, that ranking was not tuned
on. `python -m ops.sim.report FILE.csv` makes tables and plots of the results.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Final

from ops.sim import data
from ops.sim.cases import CASES, HELD_OUT, SimulationCase, case_world, speed_for_load
from ops.sim.measure import PolicyRun, RunFigures, RunSetting, summarize, write_runs
from ops.sim.policy_choice import POLICY_NAMES
from ops.sim.run import simulate
from ops.sim.traces import TraceRequest, TraceSlice
from ops.sim.world import RoutingWorld

LOADS: Final = (50, 80, 95)
AGES_S: Final = (0.1, 1.0, 5.0)
DRAWS: Final = (0, 51, 52, 53, 54)
"""The draw that ranking was tuned with, and four others."""

HELD_OUT_DRAWS: Final = (21, 22, 23)
CONGESTION_CHARGES: Final = (0.0, 0.5, 1.0, 2.0)
"""The oracle runs with each of these, and the best result counts."""


def best_oracle(world: RoutingWorld, requests: Sequence[TraceRequest], speed: float) -> RunFigures:
    """Return the best result of the oracle, which does not depend on the age of information."""
    results = [
        summarize("oracle", simulate(world, requests, speed, 1.0, f"oracle {charge}"))
        for charge in CONGESTION_CHARGES
    ]
    return min(results, key=lambda figures: figures.p90_ms)


def run_case(
    case: SimulationCase,
    folder: Path,
    requests_max: int,
    draws: Sequence[int],
    loads: Sequence[int],
    ages_s: Sequence[float],
    names: Sequence[str],
) -> Iterator[PolicyRun]:
    """Run one case in all settings, the oracle first."""
    for draw in draws:
        requests = case.read(folder / case.path, TraceSlice(requests_max, case.skip, draw))
        world = case_world(case, folder, draw or 1)
        for load in loads:
            speed = speed_for_load(load / 100, world, requests, case.cached_share)
            oracle = best_oracle(world, requests, speed)
            for age_s in ages_s:
                setting = RunSetting(case.name, load, age_s, draw, len(requests), speed)
                yield PolicyRun(setting, oracle)
                for name in names:
                    outcome = simulate(world, requests, speed, age_s, name)
                    yield PolicyRun(setting, summarize(name, outcome))


def print_run(run: PolicyRun, took_s: float) -> None:
    """Print the result of one run."""
    setting, figures = run.setting, run.figures
    print(
        f"{setting.case}, load {setting.load} %, {setting.age_s:g} s old, draw {setting.draw}: "
        f"{figures.policy:18} "
        f"p50 {figures.p50_ms:7.0f} p90 {figures.p90_ms:8.0f} p99 {figures.p99_ms:8.0f} "
        f"hit {figures.hit:4.1f} away {figures.away:3.0f} 429 {figures.refused:5}  "
        f"({took_s:.1f} s)",
        flush=True,
    )


def main() -> int:
    """Run the chosen cases and policies."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim")
    parser.add_argument(
        "--held-out", action="store_true", help="only data that nothing was tuned on"
    )
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument(
        "--requests", type=int, default=4000, help="requests of each trace, at most"
    )
    parser.add_argument("--out", type=Path, help="CSV file for the results")
    parser.add_argument("--trace", default="", help="only cases with this word in their name")
    parser.add_argument("--draw", type=int, nargs="*", help="seeds of what traces do not have")
    parser.add_argument("--load", type=int, nargs="*", help="loads in percent")
    parser.add_argument("--age", type=float, nargs="*", help="ages of information in seconds")
    parser.add_argument(
        "--policy", nargs="*", default=list(POLICY_NAMES), help="policies besides the oracle"
    )
    arguments = parser.parse_args()
    cases, draws, loads, ages_s = (
        (HELD_OUT, HELD_OUT_DRAWS, (80,), (1.0,))
        if arguments.held_out
        else (CASES, DRAWS, LOADS, AGES_S)
    )
    runs: list[PolicyRun] = []
    began_s = process_time()
    try:
        for case in cases:
            if arguments.trace.lower() not in case.name.lower():
                continue
            for run in run_case(
                case,
                data.folder(arguments.data),
                arguments.requests,
                arguments.draw or draws,
                arguments.load or loads,
                arguments.age or ages_s,
                arguments.policy,
            ):
                print_run(run, process_time() - began_s)
                began_s = process_time()
                runs.append(run)
    except data.NoData as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.out:
        write_runs(arguments.out, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
