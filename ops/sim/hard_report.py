"""The table of the hard worlds: our figures over the oracle's, the best rival, what is missed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ops.sim.measure import PolicyRun, RunFigures

P90_GOAL: Final = 1.10
P99_GOAL: Final = 1.15
HIT_GOAL_POINTS: Final = 3.0
NOISE: Final = 0.02
"""A rival that is ahead by less than this is level."""

TTFT_FIGURES: Final[Sequence[tuple[str, Callable[[RunFigures], float]]]] = (
    ("p50", lambda figures: figures.p50_ms),
    ("p90", lambda figures: figures.p90_ms),
    ("p99", lambda figures: figures.p99_ms),
)


class HardCell(NamedTuple):
    """One world at one load and age of information."""

    world: str
    load: int
    age_s: float
    oracle: RunFigures
    ours: RunFigures
    rivals: Sequence[RunFigures]

    def ratio(self, figure: Callable[[RunFigures], float]) -> float:
        """Return ours over the oracle's."""
        return figure(self.ours) / figure(self.oracle)

    def best_rival(self, figure: Callable[[RunFigures], float]) -> RunFigures | None:
        """Return the rival with the lowest value of a figure."""
        return min(self.rivals, key=figure, default=None)

    @property
    def missed(self) -> Sequence[str]:
        """Return which goals are missed."""
        missed = []
        if self.ratio(lambda figures: figures.p90_ms) > P90_GOAL:
            missed.append("p90")
        if self.ratio(lambda figures: figures.p99_ms) > P99_GOAL:
            missed.append("p99")
        if self.ours.hit < self.oracle.hit - HIT_GOAL_POINTS:
            missed.append("hits")
        for name, figure in TTFT_FIGURES:
            rival = self.best_rival(figure)
            if rival is not None and figure(rival) * (1 + NOISE) < figure(self.ours):
                ahead = figure(self.ours) / figure(rival)
                missed.append(f"behind {rival.policy} at {name} ({ahead:.2f})")
        return missed


def hard_cells(runs: Sequence[PolicyRun]) -> Sequence[HardCell]:
    """Group runs into cells."""
    grouped: dict[tuple[str, int, float], list[RunFigures]] = {}
    for setting, figures in runs:
        grouped.setdefault((setting.case, setting.load, setting.age_s), []).append(figures)
    cells = []
    for (world, load, age_s), policies in grouped.items():
        by_name = {figures.policy: figures for figures in policies}
        oracle, ours = by_name.pop("oracle"), by_name.pop("ours")
        cells.append(HardCell(world, load, age_s, oracle, ours, list(by_name.values())))
    return cells


def table_lines(cells: Sequence[HardCell]) -> Sequence[str]:
    """Return the table: a row for each world and load, with the ages side by side."""
    ages = ", ".join(f"{age_s:g}" for age_s in dict.fromkeys(cell.age_s for cell in cells))
    lines = [
        f"| world | load | oracle p90, ms | p50 over the oracle, {ages} s | p90 | p99 | "
        "hits, points | best rival's p90 over ours | missed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, int], list[HardCell]] = {}
    for cell in cells:
        rows.setdefault((cell.world, cell.load), []).append(cell)
    for (world, load), row in rows.items():
        ratios = [
            " ".join(f"{cell.ratio(figure):.2f}" for cell in row) for _, figure in TTFT_FIGURES
        ]
        hits = " ".join(f"{cell.ours.hit - cell.oracle.hit:+.1f}" for cell in row)
        missed = "; ".join(
            f"{cell.age_s:g} s: {', '.join(cell.missed)}" for cell in row if cell.missed
        )
        lines.append(
            f"| {world} | {load} % | {row[0].oracle.p90_ms:.0f} | {' | '.join(ratios)} | {hits} "
            f"| {_closest_rival(row)} | {missed or 'none'} |"
        )
    return lines


def _closest_rival(row: Sequence[HardCell]) -> str:
    """Return the lowest p90 of a rival over ours in a row, with its name."""
    found = [
        (rival.p90_ms / cell.ours.p90_ms, rival.policy)
        for cell in row
        if (rival := cell.best_rival(lambda figures: figures.p90_ms)) is not None
    ]
    return f"{min(found)[0]:.2f} ({min(found)[1]})" if found else "-"


def summary_line(cells: Sequence[HardCell]) -> str:
    """Return how many cells meet all goals."""
    met = sum(not cell.missed for cell in cells)
    p90 = sum("p90" not in cell.missed for cell in cells)
    p99 = sum("p99" not in cell.missed for cell in cells)
    hits = sum("hits" not in cell.missed for cell in cells)
    behind = sum(any(part.startswith("behind") for part in cell.missed) for cell in cells)
    return (
        f"All goals are met in {met} of {len(cells)} cells: p90 in {p90}, p99 in {p99}, hits in "
        f"{hits}; a rival is ahead in {behind}."
    )


def write_table(path: Path, runs: Sequence[PolicyRun]) -> None:
    """Write the table and its summary."""
    cells = hard_cells(runs)
    path.write_text("\n".join([*table_lines(cells), "", summary_line(cells), ""]))
