"""Compares the planner with the MILP optimum on the small worlds.

    python -m ops.sim.optimality_gap

With `--draw-seed`, the worlds are drawn at random instead: give a number that was not chosen before
the code was frozen, such as the first digits of its commit. Rows are written as they are measured.
`--resume` keeps the rows of the file and goes on after them; `--minutes` ends a run early.

Writes small_worlds.csv: seed, the optimum by HiGHS and its bound, the planner's cost, the cost of
the greedy fill alone, and the gap. HiGHS counts no load queues, so `gap_on_one_sum_percent`
compares the slots of both with queues counted alike (`recost.py`).

The test suite plans some of the worlds again and compares with the optima in the table, so it needs
no solver.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, process_time
from typing import Final

import msgspec
import numpy as np

from ops.sim.recost import empty_draft, recost, slots_of
from ops.sim.small_worlds import small_world
from scheduler.decide.cluster import ClusterState
from scheduler.decide.placement import PlanLimits
from scheduler.decide.placement.search.draft import PlacementDraft
from scheduler.decide.placement.search.local_search import LocalSearch

TABLE: Final = Path(__file__).parent / "small_worlds.csv"
COLUMNS: Final = (
    "seed",
    "optimum",
    "bound",
    "planned",
    "greedy",
    "gap_percent",
    "gap_on_one_sum_percent",
    "plan_cpu_s",
)
DRAWN_FROM: Final = 1_000
DRAWN_TO: Final = 1_000_000
"""Drawn seeds are between these: the search was developed with smaller ones."""

THOROUGH: Final = PlanLimits(starts_max=10**6, endings_max=10**6, effort=3_000)


def run_search(
    cluster: ClusterState, limits: PlanLimits = THOROUGH
) -> tuple[PlacementDraft, float]:
    """Return the draft after the search, and its cost after the greedy fill alone."""
    draft = empty_draft(cluster, limits)
    search = LocalSearch(draft, limits.settle_s, limits.effort)
    search.fill()
    greedy = total_cost(draft)
    search.run()
    return draft, greedy


def total_cost(draft: PlacementDraft) -> float:
    """Return the sum of score.py over all deployments."""
    return sum(state.cost() for state in draft.states)


def measure_gap(seed: int, limits: PlanLimits = THOROUGH) -> dict[str, float]:
    """Return one row of the table."""
    from ops.sim.milp import solve  # needs the extra `bench`; nothing else here does

    world = small_world(seed)
    began = process_time()
    draft, greedy = run_search(world, limits)
    took = process_time() - began
    solved = solve(world)
    planned = total_cost(draft)
    planned_recost = total_cost(recost(world, slots_of(draft)))
    gap_on_one_sum = planned_recost / total_cost(recost(world, solved.slots)) - 1
    return {
        "seed": seed,
        "optimum": round(solved.cost, 3),
        "bound": round(solved.bound, 3),
        "planned": round(planned, 3),
        "greedy": round(greedy, 3),
        "gap_percent": round(100 * (planned / solved.cost - 1), 4),
        "gap_on_one_sum_percent": round(100 * gap_on_one_sum, 4),
        "plan_cpu_s": round(took, 2),
    }


def drawn_seeds(draw_seed: int, count: int) -> list[int]:
    """Return `count` seeds that the search was not developed with, in random order."""
    chosen = np.random.default_rng(draw_seed).choice(DRAWN_TO - DRAWN_FROM, count, replace=False)
    return [DRAWN_FROM + int(number) for number in chosen]


def rows_of(path: Path) -> list[dict[str, float]]:
    """Return the rows of a table that was written before."""
    with path.open(newline="") as file:
        return [
            {name: int(value) if name == "seed" else float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def main() -> None:
    """Measure the gap on each world and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=120)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--draw-seed", type=lambda text: int(text, 0), help="0x... for hexadecimal")
    parser.add_argument("--effort", type=int, default=THOROUGH.effort)
    parser.add_argument("--resume", action="store_true", help="go on after the rows of the file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then end the run")
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    ends_s = monotonic() + 60 * args.minutes
    limits = msgspec.structs.replace(THOROUGH, effort=args.effort)
    seeds: Sequence[int] = range(args.first, args.first + args.worlds)
    if args.draw_seed is not None:
        seeds = drawn_seeds(args.draw_seed, args.worlds)
    rows = rows_of(args.out) if args.resume and args.out.exists() else []
    known = {row["seed"] for row in rows}
    with args.out.open("a" if rows else "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for seed in seeds:
            if seed in known or monotonic() > ends_s:
                continue
            rows.append(measure_gap(seed, limits))
            writer.writerow(rows[-1])
            file.flush()
            print(rows[-1], flush=True)
    for column in ("gap_percent", "gap_on_one_sum_percent"):
        gaps = sorted(row[column] for row in rows)
        within = sum(gap <= 1.0 for gap in gaps)
        print(
            f"{column}: {within} of {len(gaps)} within 1 %; median {gaps[len(gaps) // 2]}, "
            f"worst {gaps[-1]}"
        )


if __name__ == "__main__":
    main()
