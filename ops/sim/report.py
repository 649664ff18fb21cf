"""Tables and a plot of what the simulator found.

    python -m ops.sim.report ops/sim/results.json

Prints the tables of ops/sim/choice.md and writes ops/sim/choice.png beside it; needs the
extra `maps`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

GOAL_RATIO: Final = 1.10
GOAL_POINTS: Final = 3.0
HERE: Final = Path(__file__).parent
COLOURS: Final = {"ours": "black", "oracle": "tab:green"}


def summary(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the goal's table: each case, load and age in one line."""
    lines = [
        "| trace | load | information | oracle p90 | ours p90 | ratio | best other p90 | which | "
        "hit oracle | hit ours | goal |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        oracle, ours, *others = one["rows"]
        best = min(others, key=lambda row: float(row["p90_ms"]))
        ratio = ours["p90_ms"] / oracle["p90_ms"]
        missed = []
        if ratio > GOAL_RATIO:
            missed.append("p90")
        if best["p90_ms"] < ours["p90_ms"]:
            missed.append("behind")
        if ours["hit"] < oracle["hit"] - GOAL_POINTS:
            missed.append("hits")
        lines.append(
            f"| {one['case']} | {one['load']} % | {one['age_s']:g} s | {oracle['p90_ms']:.0f} | "
            f"{ours['p90_ms']:.0f} | {ratio:.2f} | {best['p90_ms']:.0f} | {best['policy']} | "
            f"{oracle['hit']:.1f} | {ours['hit']:.1f} | "
            f"{'met' if not missed else 'missed: ' + ', '.join(missed)} |"
        )
    return lines


def whole(one: dict[str, Any]) -> list[str]:
    """Return one case's table of all policies."""
    lines = [
        f"\n### {one['case']}, load {one['load']} %, information {one['age_s']:g} s old",
        "",
        f"{one['requests']} requests, trace sped up {one['speed']:.2f} times.",
        "",
        "| policy | TTFT p50 ms | p90 | p99 | ITL p90 ms | hit % | out of PoP % | 429 | balance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['policy']} | {row['p50_ms']:.0f} | {row['p90_ms']:.0f} | {row['p99_ms']:.0f} | "
        f"{row['itl_p90_ms']:.0f} | {row['hit']:.1f} | {row['away']:.0f} | {row['refused']} | "
        f"{row['balance']:.2f} |"
        for row in one["rows"]
    ]
    return lines


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw p90 TTFT by age of information: a row each trace, a column each load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(one["case"] for one in found))
    loads = sorted({one["load"] for one in found})
    figure, axes = pyplot.subplots(
        len(cases), len(loads), figsize=(13, 11), squeeze=False, constrained_layout=True
    )
    for at, case in enumerate(cases):
        for column, load in enumerate(loads):
            axis = axes[at][column]
            ones = [one for one in found if one["case"] == case and one["load"] == load]
            ages = [one["age_s"] for one in ones]
            for number in range(len(ones[0]["rows"])):
                name = ones[0]["rows"][number]["policy"].split(" ")[0]
                full = "oracle" if name == "oracle" else ones[0]["rows"][number]["policy"]
                axis.plot(
                    ages,
                    [one["rows"][number]["p90_ms"] / 1000 for one in ones],
                    marker="o",
                    label=full,
                    color=COLOURS.get(full),
                    linewidth=2.5 if full in COLOURS else 1.0,
                )
            axis.set(xscale="log", yscale="log", title=f"{case}, load {load} %")
            axis.set_xlabel("age of information, s")
            axis.set_ylabel("TTFT p90, s")
            axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=80)


def main() -> int:
    """Print the tables and draw."""
    if len(sys.argv) < 2:
        print("usage: python -m ops.sim.report RESULTS.json ...", file=sys.stderr)
        return 2
    found = [one for path in sys.argv[1:] for one in json.loads(Path(path).read_text())]
    print("\n".join(summary(found)))
    for one in found:
        if one["age_s"] == 1.0:
            print("\n".join(whole(one)))
    plot(found, HERE / "choice.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
