"""Tables and a plot of simulation results.

    python -m ops.sim.report ops/sim/results.csv [--plot ops/sim/choice.png]

Prints the table of the goal, and the p90 of every policy. A cell is the mean of its draws. The plot
needs the extra `maps`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from ops.sim.measure import PolicyRun, RunFigures, read_runs

GOAL_RATIO: Final = 1.10
GOAL_POINTS: Final = 3.0
COLOURS: Final = {"ours": "black", "oracle": "tab:green"}


class ResultCell(NamedTuple):
    """One case at one load and age of information, with the figures of each policy by draw."""

    case: str
    load: int
    age_s: float
    policies: dict[str, list[RunFigures]]

    def values(self, policy: str, figure: Callable[[RunFigures], float]) -> list[float]:
        """Return one figure of a policy for each draw."""
        return [figure(figures) for figures in self.policies[policy]]

    def p90_ms(self, policy: str) -> float:
        """Return a policy's p90 TTFT, the mean of all draws."""
        return fmean(self.values(policy, lambda figures: figures.p90_ms))

    def hit(self, policy: str) -> float:
        """Return a policy's hit ratio, the mean of all draws."""
        return fmean(self.values(policy, lambda figures: figures.hit))

    @property
    def ratios(self) -> list[float]:
        """Return our p90 over the oracle's, for each draw."""
        pairs = zip(self.policies["ours"], self.policies["oracle"], strict=True)
        return [ours.p90_ms / oracle.p90_ms for ours, oracle in pairs]

    @property
    def others(self) -> list[str]:
        """Return the policies that are neither ours nor the oracle."""
        return [policy for policy in self.policies if policy not in COLOURS]

    @property
    def best(self) -> str:
        """Return the best policy that is neither ours nor the oracle."""
        return min(self.others, key=self.p90_ms)

    @property
    def missed(self) -> str:
        """Return which parts of the goal are missed."""
        missed = {
            "p90": fmean(self.ratios) > GOAL_RATIO,
            "behind": self.p90_ms(self.best) < self.p90_ms("ours"),
            "hits": self.hit("ours") < self.hit("oracle") - GOAL_POINTS,
        }
        return ", ".join(part for part, is_missed in missed.items() if is_missed)


def group_runs(runs: Sequence[PolicyRun]) -> list[ResultCell]:
    """Group runs by case, load and age."""
    cells: dict[tuple[str, int, float], ResultCell] = {}
    for setting, figures in runs:
        key = (setting.case, setting.load, setting.age_s)
        cell = cells.setdefault(key, ResultCell(*key, {}))
        cell.policies.setdefault(figures.policy, []).append(figures)
    return list(cells.values())


def goal_table(cells: Sequence[ResultCell]) -> list[str]:
    """Return the table of the goal: a row for each case and load."""
    ages_s = sorted({cell.age_s for cell in cells})
    by_age = [f"ours over it, reports {age_s:g} s old" for age_s in ages_s]
    rest = ["best other over ours", "hits, %: oracle", "ours", "goal"]
    columns = ["trace", "load", "oracle p90, ms", *by_age, *rest]
    lines = header(columns)
    for group in group_cells(cells):
        best = {cell.p90_ms(cell.best) / cell.p90_ms("ours"): cell.best for cell in group}
        missed = [f"{cell.age_s:g} s {cell.missed}" for cell in group if cell.missed]
        lines.append(
            row(
                [
                    group[0].case,
                    f"{group[0].load} %",
                    f"{group[0].p90_ms('oracle'):.0f}",
                    *(spread(cell.ratios) for cell in group),
                    f"{min(best):.2f} ({best[min(best)]})",
                    f"{group[0].hit('oracle'):.1f}",
                    f"{min(cell.hit('ours') for cell in group):.1f}",
                    ", ".join(missed) or "met",
                ]
            )
        )
    ratios = [ratio for cell in cells for ratio in cell.ratios]
    behind = [
        f"{policy} ({cell.case}, {cell.load} %, {cell.age_s:g} s)"
        for cell in cells
        for policy in cell.others
        for other, ours in zip(cell.policies[policy], cell.policies["ours"], strict=True)
        if other.p90_ms < ours.p90_ms
    ]
    met = sum(not cell.missed for cell in cells)
    over = sum(ratio > GOAL_RATIO for ratio in ratios)
    return [
        *lines,
        "",
        f"Met in {met} of {len(cells)} cells; mean ratio {fmean(ratios):.3f}; of {len(ratios)} "
        f"single draws {over} are over {GOAL_RATIO:.2f}; behind another policy in "
        f"{', '.join(behind) or 'none'}.",
    ]


def all_policies(cells: Sequence[ResultCell], age_s: float) -> list[str]:
    """Return the table of every policy's p90, with reports of one age."""
    chosen = [cell for cell in cells if cell.age_s == age_s]
    if not chosen:
        return []
    columns = ["p90, ms", *(f"{cell.case.split()[0]} {cell.load} %" for cell in chosen)]
    rows = [
        [policy, *(f"{cell.p90_ms(policy):.0f}" for cell in chosen)]
        for policy in chosen[0].policies
    ]
    return [*header(columns), *(row(cells) for cells in rows)]


def group_cells(cells: Sequence[ResultCell]) -> list[list[ResultCell]]:
    """Return the cells of each case and load, by age."""
    groups: dict[tuple[str, int], list[ResultCell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.age_s):
        groups.setdefault((cell.case, cell.load), []).append(cell)
    order = [(cell.case, cell.load) for cell in cells]
    return sorted(groups.values(), key=lambda group: order.index((group[0].case, group[0].load)))


def header(columns: Sequence[str]) -> list[str]:
    """Return the head of a table."""
    return [row(columns), "|---" * len(columns) + "|"]


def row(texts: Sequence[str]) -> str:
    """Return one row of a table."""
    return f"| {' | '.join(texts)} |"


def spread(values: Sequence[float]) -> str:
    """Return the mean and the range of values."""
    return f"**{fmean(values):.2f}** ({min(values):.2f} to {max(values):.2f})"


def plot(cells: Sequence[ResultCell], path: Path) -> None:
    """Plot p90 TTFT by age of information: a row for each trace, a column for each load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(cell.case for cell in cells))
    loads = sorted({cell.load for cell in cells})
    figure, axes = pyplot.subplots(
        len(cases), len(loads), figsize=(13, 11), squeeze=False, constrained_layout=True
    )
    for row_number, case in enumerate(cases):
        for column, load in enumerate(loads):
            axis = axes[row_number][column]
            chosen = [cell for cell in cells if cell.case == case and cell.load == load]
            for policy in chosen[0].policies:
                axis.plot(
                    [cell.age_s for cell in chosen],
                    [cell.p90_ms(policy) / 1000 for cell in chosen],
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
    """Print the tables and draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.report")
    parser.add_argument("files", type=Path, nargs="+", help="CSV files of `python -m ops.sim`")
    parser.add_argument("--plot", type=Path, help="file of the plot")
    arguments = parser.parse_args()
    cells = group_runs([run for path in arguments.files for run in read_runs(path)])
    print("\n".join([*goal_table(cells), "", *all_policies(cells, 1.0)]))
    if arguments.plot:
        plot(cells, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
