"""Compare the planner with the MILP optimum on the committed small worlds.

    python -m ops.sim.optimality_gap

Writes small_worlds.csv: seed, the optimum by HiGHS, its bound, the planner's sum, greedy's alone,
and the gap on one sum: HiGHS counts no queue, so the seats of both are counted anew by the sum of
the planner.
The test suite plans some of them again and compares with the optima written here, with no solver.
"""

import argparse
import csv
from pathlib import Path
from time import process_time
from typing import Final

from ops.sim.recost import recost, slots_of
from ops.sim.small_worlds import small_world
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.planner import DraftPlan, PlanLimits
from scheduler.decide.placement.search.greedy_search import GreedySearch
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
THOROUGH: Final = PlanLimits(starts_max=10**6, endings_max=10**6, effort=3_000)


def run_search(cluster: ClusterState, limits: PlanLimits = THOROUGH) -> tuple[GreedySearch, float]:
    """Return the search when it is done, and what greedy alone had come to."""
    draft = DraftPlan(cluster, judge_liveness(cluster.nodes, cluster.acting_for_s), limits)
    search = draft.sought()
    improve = LocalSearch(search, limits.settle_s, limits.effort)
    improve.fill()
    greedy = total_cost(search)
    improve.run()
    return search, greedy


def total_cost(search: GreedySearch) -> float:
    """Return the sum of score.py over all wishes."""
    return sum(wish.cost() for wish in search.wishes)


def measure_gap(seed: int) -> dict[str, float]:
    """Return one row of the table."""
    from ops.sim.milp import solve  # the solver is an extra; the rest needs none

    world = small_world(seed)
    began = process_time()
    search, greedy = run_search(world)
    took = process_time() - began
    solved = solve(world)
    planned = total_cost(search)
    ours = total_cost(recost(world, slots_of(search)))
    on_one_sum = ours / total_cost(recost(world, solved.seats)) - 1
    return {
        "seed": seed,
        "optimum": round(solved.cost, 3),
        "bound": round(solved.bound, 3),
        "planned": round(planned, 3),
        "greedy": round(greedy, 3),
        "gap_percent": round(100 * (planned / solved.cost - 1), 4),
        "gap_on_one_sum_percent": round(100 * on_one_sum, 4),
        "plan_cpu_s": round(took, 2),
    }


def main() -> None:
    """Judge every world of the set and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=120)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    rows = []
    for seed in range(given.first, given.first + given.worlds):
        rows.append(measure_gap(seed))
        print(rows[-1], flush=True)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    gaps = sorted(row["gap_percent"] for row in rows)
    within = sum(gap <= 1.0 for gap in gaps)
    print(f"{within} of {len(gaps)} within 1 %; median {gaps[len(gaps) // 2]}, worst {gaps[-1]}")


if __name__ == "__main__":
    main()
