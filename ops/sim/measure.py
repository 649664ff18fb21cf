"""What runs come to: the figures of one, and a file of many."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from ops.sim.run import RunOutcome


class RunFigures(NamedTuple):
    """One policy in one case. Times in ms, shares in percent."""

    policy: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    itl_p90_ms: float
    hit: float
    away: float
    refused: int
    balance: float
    """Spread of how busy replicas are: standard deviation over mean."""
    error_p50_ms: float
    error_p90_ms: float
    """Of our own predictions: how far off, whichever way."""


class RunSetting(NamedTuple):
    """What a run was of."""

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
    """Sum up a run. What was refused counts as never answered."""
    answered = [one for one in outcome.served if one.replica >= 0]
    ttft_ms = [1000 * one.ttft_s for one in outcome.served]
    errors = [abs(error) for error in outcome.errors_ms]
    return RunFigures(
        policy,
        percentile(ttft_ms, 0.5),
        percentile(ttft_ms, 0.9),
        percentile(ttft_ms, 0.99),
        1000 * percentile([one.itl_s for one in answered], 0.9),
        100
        * sum(one.cached_tokens for one in answered)
        / max(1, sum(one.prompt_tokens for one in answered)),
        100 * sum(one.is_away for one in answered) / max(1, len(answered)),
        len(outcome.served) - len(answered),
        statistics.pstdev(outcome.busy) / max(1e-9, statistics.fmean(outcome.busy)),
        percentile(errors, 0.5),
        percentile(errors, 0.9),
    )


def write_runs(path: Path, runs: Iterable[PolicyRun]) -> None:
    """Keep runs, one a line."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow((*RunSetting._fields, *RunFigures._fields))
        for run in runs:
            cells = (*run.setting, *run.figures)
            lines.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])


def read_runs(path: Path) -> list[PolicyRun]:
    """Read what was kept."""
    with path.open(newline="") as file:
        return [
            PolicyRun(_typed(RunSetting, row), _typed(RunFigures, row))
            for row in csv.DictReader(file)
        ]


def _typed(kind: Any, row: dict[str, str]) -> Any:
    """Return a row's cells of one kind, each of its own type."""
    return kind(**{name: typed(row[name]) for name, typed in get_type_hints(kind).items()})
