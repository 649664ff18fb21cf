"""Compares the placements that a live fleet gets with the MILP optimum, on the small worlds.

    python -m ops.sim.production_gap --worlds 20 --draw-seed 0x...

`ops.sim.optimality_gap` measures the search alone, with the effort that it is given. Here the
scheduler's plans, with their limits of starts and of effort, are carried out one after the other on
an empty fleet until nothing moves, with and without the thorough search that a small fleet gets.
The slots of both and of the optimum are costed alike (`recost.py`).

Writes small_worlds_live.csv: seed, the gap in percent and the CPU time of the longest plan of
each, and how many plans moved something.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Final, NamedTuple

import msgspec

from ops.sim.optimality_gap import drawn_seeds, rows_of, total_cost
from ops.sim.recost import SlotColumn, empty_draft, recost
from ops.sim.small_worlds import small_world
from scheduler.decide.cluster import ClusterState
from scheduler.decide.placement import PlanLimits, plan_fleet
from scheduler.decide.whatif.simulation import apply_plan

TABLE: Final = Path(__file__).parent / "small_worlds_live.csv"
COLUMNS: Final = (
    *("seed", "gap_before_percent", "gap_percent"),
    *("plan_cpu_before_s", "plan_cpu_s", "plans_before", "plans"),
)
PLANS_MAX: Final = 100
QUIET_PLANS: Final = 7
"""After so many plans of a minute each that move nothing, replicas that have settled stay, too."""


class LiveFleet(NamedTuple):
    """A fleet whose plans were carried out: how many moved something, and the longest in s."""

    cluster: ClusterState
    plans: int
    longest_s: float


def carried_out(world: ClusterState, limits: PlanLimits) -> LiveFleet:
    """Plan and carry out, from an empty fleet, until nothing moves."""
    fleet, quiet = LiveFleet(world, 0, 0.0), 0
    for _ in range(PLANS_MAX):
        began = process_time()
        plan = plan_fleet(fleet.cluster, limits=limits)
        took_s = process_time() - began
        quiet = quiet + 1 if plan.is_empty else 0
        fleet = LiveFleet(
            apply_plan(fleet.cluster, plan),
            fleet.plans + (not plan.is_empty),
            max(fleet.longest_s, took_s),
        )
        if quiet == QUIET_PLANS:
            break
    return fleet


def slots_held(cluster: ClusterState) -> list[SlotColumn]:
    """Return the slots of the replicas that run."""
    table = empty_draft(cluster, PlanLimits()).fleet.table
    nodes = {node.node_id: node for node in cluster.nodes}
    return [
        SlotColumn(
            placement.deployment_id,
            table.site_of_placement(placement, nodes[placement.node_id]),
            placement.node_id,
            placement.device_ids,
        )
        for placement in cluster.placements
    ]


def measure_live(seed: int) -> dict[str, float]:
    """Return one row of the table."""
    from ops.sim.milp import solve  # needs the extra `bench`; nothing else here does

    world = small_world(seed)
    limits = PlanLimits()
    before = carried_out(world, msgspec.structs.replace(limits, thorough_effort=0))
    after = carried_out(world, limits)
    optimum = total_cost(recost(world, solve(world).slots))
    gaps = [
        100 * (total_cost(recost(world, slots_held(fleet.cluster))) / optimum - 1)
        for fleet in (before, after)
    ]
    return {
        "seed": seed,
        "gap_before_percent": round(gaps[0], 4),
        "gap_percent": round(gaps[1], 4),
        "plan_cpu_before_s": round(before.longest_s, 2),
        "plan_cpu_s": round(after.longest_s, 2),
        "plans_before": before.plans,
        "plans": after.plans,
    }


def summary(rows: Sequence[dict[str, float]]) -> str:
    """Return what the rows say, in a line for each way to plan."""
    lines = []
    for name in ("before", ""):
        suffix = f"_{name}" if name else ""
        gaps = sorted(row[f"gap{suffix}_percent"] for row in rows)
        longest = sorted(row[f"plan_cpu{suffix}_s"] for row in rows)
        within = sum(gap <= 1.0 for gap in gaps)
        lines.append(
            f"{name or 'now'}: {within} of {len(gaps)} within 1 %; median "
            f"{gaps[len(gaps) // 2]:.3f}, mean {sum(gaps) / len(gaps):.2f}, worst {gaps[-1]:.1f}; "
            f"longest plan {longest[len(longest) // 2]:.2f} s of CPU in the median, "
            f"{longest[-1]:.2f} at most"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure each world and write the table; go on after the rows that the file has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--draw-seed", type=lambda text: int(text, 0), help="0x... for hexadecimal")
    parser.add_argument("--seeds-of", type=Path, help="the first seeds of another table")
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    if args.seeds_of is not None:
        seeds = [int(row["seed"]) for row in rows_of(args.seeds_of)][: args.worlds]
    elif args.draw_seed is not None:
        seeds = drawn_seeds(args.draw_seed, args.worlds)
    else:
        seeds = list(range(args.worlds))
    rows = rows_of(args.out) if args.out.exists() else []
    known = {row["seed"] for row in rows}
    with args.out.open("a" if rows else "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for seed in seeds:
            if seed in known:
                continue
            rows.append(measure_live(seed))
            writer.writerow(rows[-1])
            file.flush()
            print(rows[-1], flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
