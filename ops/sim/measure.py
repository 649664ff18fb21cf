"""What a run comes to: the figures of one row of the table."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ops.sim.run import Outcome


class Figures(NamedTuple):
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


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def figures_of(policy: str, outcome: Outcome) -> Figures:
    """Sum up a run. What was refused counts as never answered."""
    answered = [one for one in outcome.served if one.replica >= 0]
    ttft_ms = [1000 * one.ttft_s for one in outcome.served]
    errors = [abs(error) for error in outcome.errors_ms]
    return Figures(
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
