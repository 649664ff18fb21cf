"""Summarize the rows of a simulated week by the hour.

    python -m ops.sim.planet_week planet.jsonl

Writes planet_week.csv.
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ops.sim.planet import HOUR

TABLE: Final = Path(__file__).parent / "planet_week.csv"


class Churn(NamedTuple):
    """The moves of some hours, in percent of the replicas and per hour.

    `growth` is what changes the number of replicas, `turnover` are the starts and ends beyond that.
    """

    growth: float
    turnover: float


def churn_of(hours: Sequence[Mapping[str, float]]) -> Churn:
    """Divide the moves of some hours into growth and turnover."""
    starts = sum(float(hour["starts"]) for hour in hours)
    endings = sum(float(hour["endings"]) for hour in hours)
    replica_hours = sum(float(hour["replicas"]) for hour in hours)
    return Churn(
        growth=100 * abs(starts - endings) / replica_hours,
        turnover=100 * 2 * min(starts, endings) / replica_hours,
    )


def by_hour(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return one row per hour: demand, service, and what the planner did."""
    return [_hour(rows[begin : begin + HOUR]) for begin in range(0, len(rows), HOUR)]


def _hour(rows: list[dict[str, Any]]) -> dict[str, float]:
    demand = np.array([row["asked_per_s"] for row in rows])
    plans = [row for row in rows if "plan_cpu_s" in row]
    moves = sum(row["starts"] + row["endings"] for row in plans)
    return {
        "minute": rows[0]["minute"],
        "asked_per_s": round(float(demand.mean()), 1),
        "served_share": round(
            float(np.average([r["served_share"] for r in rows], weights=demand)), 5
        ),
        "served_share_least": min(row["served_share"] for row in rows),
        "rtt_mean_ms": round(
            float(np.average([r["rtt_mean_ms"] for r in rows], weights=demand)), 2
        ),
        "rtt_p90_all_ms": round(
            float(np.average([r["rtt_p90_all_ms"] for r in rows], weights=demand)), 2
        ),
        "rtt_p90_ms": round(float(np.average([r["rtt_p90_ms"] for r in rows], weights=demand)), 2),
        "replicas": rows[-1]["replicas"],
        "memory_tib": plans[-1]["memory_tib"],
        "nodes_lost_most": max(row["lost"] for row in rows),
        "plans": len(plans),
        "starts": sum(row["starts"] for row in plans),
        "endings": sum(row["endings"] for row in plans),
        "moves_percent": round(100 * moves / rows[0]["replicas"], 2),
        "plan_cpu_most_s": max(row["plan_cpu_s"] for row in plans),
        "breaches": sum(row["breaches"] for row in plans),
    }


def main() -> None:
    """Write the table and print the figures that the goals name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    hours = by_hour(rows)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(hours[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(hours)
    plan_s = [row["plan_cpu_s"] for row in rows if "plan_cpu_s" in row]
    p50, p99 = np.percentile(plan_s[1:], (50, 99))
    print(f"first plan {plan_s[0]:.2f} s; {len(plan_s) - 1} more: p50 {p50:.3f} s, p99 {p99:.3f} s")
    first = churn_of(hours[1:24])
    print(f"first day, an hour: {first.growth:.2f} % growth, {first.turnover:.2f} % turnover")
    steady = sorted(hour["moves_percent"] for hour in hours[24:])
    over = sum(moves > 1.0 for moves in steady)
    print(
        f"moves an hour after the first day: median {steady[len(steady) // 2]} %, {over} over 1 %"
    )
    for name in ("memory_tib", "rtt_p90_ms", "rtt_p90_all_ms", "rtt_mean_ms"):
        after = [hour[name] for hour in hours[24:] or hours]
        print(f"{name} after the first day: mean {np.mean(after):.1f}, most {max(after):.1f}")
    print(f"least served in a minute: {min(row['served_share'] for row in rows)}")
    for row in rows:
        if "rollout" in row:
            print(row["minute"], row["rollout"])


if __name__ == "__main__":
    main()
