"""Checks the batches of rows that routers send: each row is accepted, clamped or refused.

Rule: the store can hold every accepted row. A refused row is answered with its reason and not
requested again: a row that no retry can fix must not block the rows behind it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from operator import add, attrgetter
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.peers.usage import Demand, DemandRow, RoundTrip, TrialRow, Usage, UsageRow

DEMAND_ROWS_MAX: Final = 20_000
"""Rows of one batch, one per deployment: more than any router serves, few enough for the store."""

USAGE_ROWS_MAX: Final = 10_000
LATE_MAX_S: Final = 3600.0
"""Demand older than this is not counted: a repeated batch could no longer be recognized."""

WINDOW_MAX_S: Final = 600.0
COUNT_MAX: Final = 10**12
"""More than a router can count in one window; the sum over a year stays below 2**63."""

TOKENS_MAX: Final = 2**53
ID_LETTERS_MAX: Final = 256
TRIAL_ROWS_MAX: Final = 2_000
TRIAL_LATE_MAX_S: Final = 120.0
"""Attempts older than this may belong to the rollout's previous step."""

TRIAL_COUNT_MAX: Final = 10**7
RTT_MAX_MS: Final = 60_000.0
COUNTS: Final = (
    "requests", "prompt_tokens", "uncached_tokens", "output_tokens", "refused", "no_replica"
)  # fmt: skip
_counts: Final = attrgetter(*COUNTS)

UNIX_MAX_S: Final = 4_102_444_800.0
"""The year 2100: a later start comes from a wrong clock."""


class AcceptedDemand(NamedTuple):
    """Demand rows, how old they are, and the number of refused rows by reason."""

    rows: tuple[DemandRow, ...]
    age_s: float
    refused: Mapping[str, int]


class AcceptedUsage(NamedTuple):
    """Usage rows to write, and the number of refused rows by reason."""

    rows: tuple[UsageRow, ...]
    refused: Mapping[str, int]


def accept_demand(city: PopId, demand: Demand) -> AcceptedDemand:
    """Return the demand rows to count, one per deployment, and their age.

    A router may report its own city only, so that a compromised router cannot attract replicas to
    others. The age is measured by its monotonic clock: a wrong wall clock has no effect.
    """
    if len(demand.rows) > DEMAND_ROWS_MAX:
        reason = f"cannot count {len(demand.rows)} rows in one batch: at most {DEMAND_ROWS_MAX}"
        return AcceptedDemand((), 0.0, {reason: len(demand.rows)})
    age_s = _clamped(demand.age_s, 1e9) + _clamped(demand.window_s, WINDOW_MAX_S) / 2
    if age_s > LATE_MAX_S:
        reason = f"cannot count demand more than {LATE_MAX_S:.0f} s late"
        return AcceptedDemand((), age_s, {reason: len(demand.rows)} if demand.rows else {})
    refused: Counter[str] = Counter()
    summed: dict[tuple[DeploymentId, PopId], tuple[int, ...]] = {}
    for row in demand.rows:
        problem = _id_problem((row.deployment_id, row.pop)) or _count_problem(row, city)
        if problem:
            refused[f"cannot count a row: {problem}"] += 1
        elif any(_counts(row)):
            key, counts = (row.deployment_id, row.pop), _bounded(_counts(row))
            if key in summed:
                counts = _bounded(tuple(map(add, summed[key], counts)))
            summed[key] = counts
    return AcceptedDemand(
        tuple(_row(*key, counts) for key, counts in sorted(summed.items())), age_s, refused
    )


def accept_trials(city: PopId, demand: Demand) -> tuple[TrialRow, ...]:
    """Return the rows about versions in a rollout that are recent and valid."""
    if len(demand.trials) > TRIAL_ROWS_MAX or _clamped(demand.age_s, 1e9) > TRIAL_LATE_MAX_S:
        return ()
    return tuple(
        sorted(
            (row for row in demand.trials if row.asked_pop == city and not _is_invalid_trial(row)),
            key=lambda row: (row.deployment_id, row.version, row.pop, row.asked_pop),
        )
    )


def accept_usage(usage: Usage) -> AcceptedUsage:
    """Return the usage rows that the ledger can hold."""
    if len(usage.rows) > USAGE_ROWS_MAX:
        reason = f"cannot write {len(usage.rows)} rows in one batch: at most {USAGE_ROWS_MAX}"
        return AcceptedUsage((), {reason: len(usage.rows)})
    refused: Counter[str] = Counter()
    rows = []
    for row in usage.rows:
        problem = _usage_problem(row)
        if problem:
            refused[f"cannot write a row: {problem}"] += 1
        else:
            rows.append(
                msgspec.structs.replace(
                    row,
                    ttft_ms=_clamped(row.ttft_ms, 1e12),
                    duration_ms=_clamped(row.duration_ms, 1e12),
                )
            )
    return AcceptedUsage(tuple(sorted(rows, key=lambda row: row.request_id)), refused)


def accept_round_trips(rows: Iterable[RoundTrip]) -> tuple[RoundTrip, ...]:
    """Return the valid round trips, one per node. A negative one is a clock error and counts as
    zero."""
    by_node = {row.node_id: row for row in rows}
    return tuple(
        msgspec.structs.replace(row, rtt_ms=max(0.0, row.rtt_ms))
        for row in by_node.values()
        if isfinite(row.rtt_ms) and row.rtt_ms <= RTT_MAX_MS and not _id_problem((row.node_id,))
    )


def _usage_problem(row: UsageRow) -> str:
    names = (row.request_id, row.key_id, row.tenant_id, row.deployment_id)
    problem = _id_problem((*names, row.pop, row.node_id, row.replica_id))
    if problem:
        return problem
    counts = (row.prompt_tokens, row.cached_tokens, row.output_tokens)
    if any(count < 0 or count > TOKENS_MAX for count in counts):
        return f"a count is below 0 or over {TOKENS_MAX}"
    if not 0 <= row.started_at <= UNIX_MAX_S:
        return "its start is not between 1970 and 2100"
    return ""


def _is_invalid_trial(row: TrialRow) -> bool:
    counts = (row.attempts, row.failures, row.ttft.count, row.itl.count, row.version)
    sums = (row.ttft.total, row.ttft.squares, row.itl.total, row.itl.squares)
    return (
        bool(_id_problem((row.deployment_id, row.pop, row.asked_pop)))
        or any(not 0 <= count <= TRIAL_COUNT_MAX for count in counts)
        or any(not isfinite(value) or abs(value) > COUNT_MAX for value in sums)
        or row.failures > row.attempts
    )


def _id_problem(names: Iterable[str]) -> str:
    for name in names:
        if "\0" in name:
            return "a name contains a NUL"
        if len(name) > ID_LETTERS_MAX:
            return f"a name has more than {ID_LETTERS_MAX} letters"
    return ""


def _count_problem(row: DemandRow, city: PopId) -> str:
    if row.pop != city:
        return f"it is of {row.pop}, but the router is in {city}"
    return "a count is below 0" if any(count < 0 for count in _counts(row)) else ""


def _bounded(counts: tuple[int, ...]) -> tuple[int, ...]:
    requests, prompt, uncached, output, refused, no_replica = (min(n, COUNT_MAX) for n in counts)
    return (
        *(requests, prompt, min(uncached, prompt), output),
        *(min(refused, requests), min(no_replica, requests)),
    )


def _row(deployment_id: DeploymentId, pop: PopId, counts: tuple[int, ...]) -> DemandRow:
    names = dict(zip(COUNTS, counts, strict=True))
    return DemandRow(deployment_id=deployment_id, pop=pop, **names)


def _clamped(value: float, value_max: float) -> float:
    return min(max(value, 0.0), value_max) if isfinite(value) else 0.0
