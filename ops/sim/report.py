"""Tables and a plot of what the simulator found.

    python -m ops.sim.report ops/sim/results.csv [--plot ops/sim/choice.png]

Prints the goal's table, and with `--whole` all policies of each case. A cell is the mean of its
draws. The plot needs the extra `maps`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from ops.sim.measure import Figures, Run, read

GOAL_RATIO: Final = 1.10
GOAL_POINTS: Final = 3.0
COLOURS: Final = {"ours": "black", "oracle": "tab:green"}


class Cell(NamedTuple):
    """One case at one load and age of information: each policy's figures, a draw after another."""

    case: str
    load: int
    age_s: float
    policies: dict[str, list[Figures]]

    def of(self, policy: str, what: Callable[[Figures], float]) -> list[float]:
        """Return a figure of a policy, a draw after another."""
        return [what(figures) for figures in self.policies[policy]]

    def p90_ms(self, policy: str) -> float:
        """Return a policy's p90, the mean of all draws."""
        return fmean(self.of(policy, lambda figures: figures.p90_ms))

    def hit(self, policy: str) -> float:
        """Return a policy's hit ratio, the mean of all draws."""
        return fmean(self.of(policy, lambda figures: figures.hit))

    @property
    def ratios(self) -> list[float]:
        """Return our p90 over the oracle's, a draw after another."""
        pairs = zip(self.policies["ours"], self.policies["oracle"], strict=True)
        return [ours.p90_ms / oracle.p90_ms for ours, oracle in pairs]

    @property
    def best(self) -> str:
        """Return the best of the others."""
        others = [policy for policy in self.policies if policy not in COLOURS]
        return min(others, key=self.p90_ms)

    @property
    def verdict(self) -> str:
        """Return whether the goal is met, and else what of it is missed."""
        missed = {
            "p90": fmean(self.ratios) > GOAL_RATIO,
            "behind": self.p90_ms(self.best) < self.p90_ms("ours"),
            "hits": self.hit("ours") < self.hit("oracle") - GOAL_POINTS,
        }
        said = ", ".join(what for what, is_missed in missed.items() if is_missed)
        return f"missed: {said}" if said else "met"


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """Put the draws of a case together."""
    cells: dict[tuple[str, int, float], Cell] = {}
    for of, figures in runs:
        key = (of.case, of.load, of.age_s)
        cell = cells.setdefault(key, Cell(*key, {}))
        cell.policies.setdefault(figures.policy, []).append(figures)
    return list(cells.values())


def summary(cells: Sequence[Cell]) -> list[str]:
    """Return the goal's table: each case, load and age in one line."""
    lines = [
        "| trace | load | information | oracle p90 | ours p90 | ratio, by draw | best other p90 "
        "| which | hit oracle | hit ours | goal |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        ratios, best = cell.ratios, cell.best
        lines.append(
            f"| {cell.case} | {cell.load} % | {cell.age_s:g} s | {cell.p90_ms('oracle'):.0f} "
            f"| {cell.p90_ms('ours'):.0f} "
            f"| **{fmean(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {cell.p90_ms(best):.0f} | {best} | {cell.hit('oracle'):.1f} "
            f"| {cell.hit('ours'):.1f} | {cell.verdict} |"
        )
    ratios = [ratio for cell in cells for ratio in cell.ratios]
    ahead = [
        f"{policy} ({cell.case}, {cell.load} %, {cell.age_s:g} s)"
        for cell in cells
        for policy in cell.policies
        if policy not in COLOURS
        for other, ours in zip(cell.policies[policy], cell.policies["ours"], strict=True)
        if other.p90_ms < ours.p90_ms
    ]
    met = sum(cell.verdict == "met" for cell in cells)
    lines += [
        "",
        f"Met in {met} of {len(cells)} cells; the ratio's mean "
        f"{fmean(ratios):.3f}; of the {len(ratios)} single draws "
        f"{sum(ratio > GOAL_RATIO for ratio in ratios)} are over {GOAL_RATIO:.2f}; another policy "
        f"is ahead in {', '.join(ahead) or 'none'}.",
    ]
    return lines


def whole(cell: Cell) -> list[str]:
    """Return one case's table of all policies."""
    lines = [
        f"\n### {cell.case}, load {cell.load} %, information {cell.age_s:g} s old",
        "",
        "| policy | TTFT p50 ms | p90 | p99 | ITL p90 ms | hit % | out of PoP % | 429 | balance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for policy, draws in cell.policies.items():
        mean = [fmean(values) for values in list(zip(*draws, strict=True))[1:]]
        p50, p90, p99, itl, hit, away, refused, balance, *_ = mean
        lines.append(
            f"| {policy} | {p50:.0f} | {p90:.0f} | {p99:.0f} | {itl:.0f} | {hit:.1f} | {away:.0f} "
            f"| {refused:.0f} | {balance:.2f} |"
        )
    return lines


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draw p90 TTFT by age of information: a row each trace, a column each load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(cell.case for cell in cells))
    loads = sorted({cell.load for cell in cells})
    figure, axes = pyplot.subplots(
        len(cases), len(loads), figsize=(13, 11), squeeze=False, constrained_layout=True
    )
    for at, case in enumerate(cases):
        for column, load in enumerate(loads):
            axis = axes[at][column]
            ones = [cell for cell in cells if cell.case == case and cell.load == load]
            for policy in ones[0].policies:
                axis.plot(
                    [cell.age_s for cell in ones],
                    [cell.p90_ms(policy) / 1000 for cell in ones],
                    marker="o",
                    label=policy,
                    color=COLOURS.get(policy),
                    linewidth=2.5 if policy in COLOURS else 1.0,
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
    parser = argparse.ArgumentParser(prog="python -m ops.sim.report")
    parser.add_argument("files", type=Path, nargs="+", help="what `python -m ops.sim` kept")
    parser.add_argument("--whole", action="store_true", help="all policies, words 1 s old")
    parser.add_argument("--plot", type=Path, help="where to draw")
    asked = parser.parse_args()
    cells = cells_of([run for path in asked.files for run in read(path)])
    print("\n".join(summary(cells)))
    if asked.whole:
        for cell in cells:
            if cell.age_s == 1.0:
                print("\n".join(whole(cell)))
    if asked.plot:
        plot(cells, asked.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
