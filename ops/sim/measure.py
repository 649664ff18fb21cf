"""Figures that sum up runs, and a CSV file of them."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from ops.sim.outcome import RunOutcome


class RunFigures(NamedTuple):
    """The results of one policy in one run. Times in ms, shares in percent."""

    policy: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    itl_p90_ms: float
    hit: float
    away: float
    refused: int
    balance: float
    """Standard deviation over mean of how busy the replicas are."""
    error_p50_ms: float
    error_p90_ms: float
    """Absolute error of our own predictions."""


class RunSetting(NamedTuple):
    """The conditions of a run."""

    case: str
    load: int
    age_s: float
    draw: int
    requests: int
    speed: float


class PolicyRun(NamedTuple):
    """One run of one policy."""

    setting: RunSetting
    figures: RunFigures


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summarize(policy: str, outcome: RunOutcome) -> RunFigures:
    """Sum up a run. A refused request counts with an infinite time to first token."""
    answered = [request for request in outcome.served if request.replica >= 0]
    ttft_ms = [1000 * request.ttft_s for request in outcome.served]
    errors = [abs(error) for error in outcome.errors_ms]
    return RunFigures(
        policy,
        percentile(ttft_ms, 0.5),
        percentile(ttft_ms, 0.9),
        percentile(ttft_ms, 0.99),
        1000 * percentile([request.itl_s for request in answered], 0.9),
        100
        * sum(request.cached_tokens for request in answered)
        / max(1, sum(request.prompt_tokens for request in answered)),
        100 * sum(request.is_away for request in answered) / max(1, len(answered)),
        len(outcome.served) - len(answered),
        statistics.pstdev(outcome.busy) / max(1e-9, statistics.fmean(outcome.busy)),
        percentile(errors, 0.5),
        percentile(errors, 0.9),
    )


def write_runs(path: Path, runs: Iterable[PolicyRun]) -> None:
    """Write runs as CSV, one per line."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow((*RunSetting._fields, *RunFigures._fields))
        for run in runs:
            cells = (*run.setting, *run.figures)
            lines.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])


def read_runs(path: Path) -> list[PolicyRun]:
    """Read the runs of a CSV file."""
    with path.open(newline="") as file:
        return [
            PolicyRun(_typed(RunSetting, row), _typed(RunFigures, row))
            for row in csv.DictReader(file)
        ]


def _typed(kind: Any, row: dict[str, str]) -> Any:
    """Convert the cells of a row into one NamedTuple."""
    return kind(**{name: typed(row[name]) for name, typed in get_type_hints(kind).items()})
