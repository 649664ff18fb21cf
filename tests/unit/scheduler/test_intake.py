"""Rows of a router's batch are accepted, clamped or refused; accepted rows fit in the store."""

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import (
    BootId,
    DeploymentId,
    KeyId,
    NodeId,
    PopId,
    ReplicaId,
    RequestId,
    RouterId,
    TenantId,
)
from isochrone.wire.peers.usage import (
    Demand,
    DemandRow,
    RequestOutcome,
    RoundTrip,
    TrialRow,
    Usage,
    UsageRow,
)
from router.decide.routes import rollout
from router.loops.ship_reports import BATCH_ROWS_MAX
from scheduler.decide.demand.intake import (
    COUNT_MAX,
    DEMAND_ROWS_MAX,
    LATE_MAX_S,
    TRIAL_LATE_MAX_S,
    TRIAL_ROWS_MAX,
    USAGE_ROWS_MAX,
    accept_demand,
    accept_round_trips,
    accept_trials,
    accept_usage,
)

AMS = PopId("ams")


def a_row(deployment: str = "d", pop: str = "ams", **counts: int) -> DemandRow:
    return DemandRow(deployment_id=DeploymentId(deployment), pop=PopId(pop), **counts)


def a_demand(*rows: DemandRow, **fields: Any) -> Demand:
    values: dict[str, Any] = {"seq": 1, "window_s": 5.0, **fields}
    return Demand(router_id=RouterId("r"), boot_id=BootId("b"), rows=rows, **values)


def a_usage(request: str = "q", **fields: Any) -> UsageRow:
    values: dict[str, Any] = {
        "key_id": KeyId("k"),
        "tenant_id": TenantId("t"),
        "deployment_id": DeploymentId("d"),
        "pop": PopId("ams"),
        "node_id": NodeId("n1"),
        "replica_id": ReplicaId("r1"),
        "started_at": 1_700_000_000.0,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 5,
        "outcome": RequestOutcome.COMPLETE,
        **fields,
    }
    return UsageRow(request_id=RequestId(request), **values)


def test_rows_of_one_deployment_are_summed_and_zero_rows_dropped() -> None:
    taken = accept_demand(AMS, a_demand(a_row(requests=2), a_row("e"), a_row(requests=3)))
    assert taken.rows == (a_row(requests=5),)
    assert taken.refused == {}
    assert taken.age_s == 2.5


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (a_row(requests=-1), "below 0"),
        (a_row(deployment="d\0"), "NUL"),
        (a_row(pop="x" * 300), "256 letters"),
        (a_row(pop="sin", requests=9), "it is of sin, but the router is in ams"),
    ],
)
def test_only_the_invalid_row_is_refused(row: DemandRow, words: str) -> None:
    taken = accept_demand(AMS, a_demand(row, a_row(requests=1)))
    assert taken.rows == (a_row(requests=1),)
    ((reason, rows),) = taken.refused.items()
    assert reason.startswith("cannot count")
    assert words in reason
    assert rows == 1


def test_a_batch_with_too_many_rows_is_refused() -> None:
    taken = accept_demand(AMS, a_demand(*[a_row(requests=1)] * 1_000_000))
    assert taken.rows == ()
    ((reason, rows),) = taken.refused.items()
    assert f"at most {DEMAND_ROWS_MAX}" in reason
    assert rows == 1_000_000


def test_usage_with_too_many_rows_is_refused_and_a_routers_batch_is_not() -> None:
    def rows(count: int) -> Usage:
        return Usage(router_id=RouterId("r"), batch_id="1", rows=(a_usage(),) * count)

    taken = accept_usage(rows(USAGE_ROWS_MAX + 1))
    assert taken.rows == ()
    ((reason, refused),) = taken.refused.items()
    assert f"at most {USAGE_ROWS_MAX}" in reason
    assert refused == USAGE_ROWS_MAX + 1
    assert len(accept_usage(rows(BATCH_ROWS_MAX)).rows) == BATCH_ROWS_MAX


@pytest.mark.parametrize(
    ("count", "age_s", "taken"),
    [
        (TRIAL_ROWS_MAX, 0.0, TRIAL_ROWS_MAX),
        (TRIAL_ROWS_MAX + 1, 0.0, 0),
        (1, TRIAL_LATE_MAX_S + 1.0, 0),
    ],
)
def test_trials_are_counted_if_they_are_few_and_recent(
    count: int, age_s: float, taken: int
) -> None:
    trial = TrialRow(deployment_id=DeploymentId("d"), version=1, pop=AMS, asked_pop=AMS, attempts=1)
    demand = a_demand(age_s=age_s, trials=(trial,) * count)
    assert len(accept_trials(AMS, demand)) == taken
    # All that a router keeps is taken.
    assert rollout.ROWS_MAX <= TRIAL_ROWS_MAX


@pytest.mark.parametrize(
    ("window_s", "age_s", "taken_at_s"),
    [(nan, nan, 0), (-5, -90, 0), (inf, 10, 10), (10, 100, 105), (1e9, 0, 300)],
)
def test_implausible_ages_are_clamped(window_s: float, age_s: float, taken_at_s: float) -> None:
    taken = accept_demand(AMS, a_demand(a_row(requests=1), window_s=window_s, age_s=age_s))
    assert taken.age_s == taken_at_s
    assert len(taken.rows) == 1


def test_demand_that_is_too_late_is_refused() -> None:
    taken = accept_demand(AMS, a_demand(a_row(requests=1), age_s=LATE_MAX_S))
    assert taken.rows == ()
    assert list(taken.refused.values()) == [1]


def test_contradictory_counts_are_clamped() -> None:
    odd = a_row(requests=2, refused=9, no_replica=5, prompt_tokens=10, uncached_tokens=70)
    (row,) = accept_demand(AMS, a_demand(odd)).rows
    assert row == a_row(requests=2, refused=2, no_replica=2, prompt_tokens=10, uncached_tokens=10)


@pytest.mark.parametrize(
    "fields",
    [
        {"key_id": KeyId("k\0")},
        {"prompt_tokens": -1},
        {"output_tokens": 2**64 - 1},
        {"started_at": nan},
        {"started_at": 1e300},
        {"started_at": -1.0},
        {"replica_id": ReplicaId("r" * 10_000)},
    ],
)
def test_only_the_invalid_usage_row_is_refused(fields: dict[str, Any]) -> None:
    rows = (a_usage("b", **fields), a_usage("a"))
    taken = accept_usage(Usage(router_id=RouterId("r"), batch_id="1", rows=rows))
    assert [row.request_id for row in taken.rows] == ["a"]
    assert list(taken.refused.values()) == [1]
    assert all(reason.startswith("cannot write") for reason in taken.refused)


def test_implausible_usage_times_are_clamped() -> None:
    row = a_usage(ttft_ms=nan, duration_ms=-inf)
    (taken,) = accept_usage(Usage(router_id=RouterId("r"), batch_id="1", rows=(row,))).rows
    assert (taken.ttft_ms, taken.duration_ms) == (0.0, 0.0)


def test_invalid_round_trips_are_left_out() -> None:
    rows = [RoundTrip(node_id=NodeId(f"n{n}"), rtt_ms=ms) for n, ms in enumerate([nan, inf, -1, 7])]
    assert [row.rtt_ms for row in accept_round_trips(rows)] == [0.0, 7.0]
    twice = [RoundTrip(node_id=NodeId("n"), rtt_ms=ms) for ms in (5.0, 6.0)]
    assert [row.rtt_ms for row in accept_round_trips(twice)] == [6.0]


counts = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 100)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            a_row,
            deployment=st.text(max_size=3) | st.sampled_from(["a", "b"]),
            pop=st.sampled_from(["ams", "sin", "\0"]),
            requests=counts,
            prompt_tokens=counts,
            uncached_tokens=counts,
            output_tokens=counts,
            refused=counts,
            no_replica=counts,
        ),
        max_size=8,
    ),
    window_s=st.floats(),
    age_s=st.floats(),
)
def test_accepted_rows_fit_into_the_store(
    rows: list[DemandRow], window_s: float, age_s: float
) -> None:
    taken = accept_demand(AMS, a_demand(*rows, window_s=window_s, age_s=age_s))
    assert taken.age_s >= 0
    keys = [(row.deployment_id, row.pop) for row in taken.rows]
    assert keys == sorted(set(keys))
    for row in taken.rows:
        assert "\0" not in row.deployment_id + row.pop
        assert 0 <= row.uncached_tokens <= row.prompt_tokens <= COUNT_MAX
        assert 0 <= max(row.refused, row.no_replica) <= row.requests <= COUNT_MAX
    if taken.age_s <= LATE_MAX_S:
        assert sum(taken.refused.values()) + len(taken.rows) <= len(rows)
