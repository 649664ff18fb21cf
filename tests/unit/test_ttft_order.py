"""The order within a tenant: the first due first, late ones make way, none starves."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from isochrone.ttft_order import (
    LATE_GRACE_S,
    TTFT_DEFAULT_S,
    TTFT_MS_MAX,
    TtftObjective,
    ttft_objective,
)


class Waiting(NamedTuple):
    """One request of the tenant."""

    number: int
    objective: TtftObjective


class Served(NamedTuple):
    """A request that began, when it did, and those that went on waiting."""

    request: Waiting
    at_s: float
    left: list[Waiting]


OBJECTIVES = st.builds(
    lambda after_s, ttft_ms, prefill_ms: (after_s, ttft_ms, prefill_ms),
    st.floats(0, 30),
    st.one_of(st.none(), st.integers(0, 60_000)),
    st.integers(0, 8_000),
)


def serve(drawn: list[tuple[float, int | None, int]]) -> list[Served]:
    """Serve one request at a time, each for the time that its prompt takes."""
    coming, at_s = [], 0.0
    for number, (after_s, ttft_ms, prefill_ms) in enumerate(drawn):
        at_s += after_s
        coming.append(Waiting(number, ttft_objective(at_s, ttft_ms, prefill_ms)))
    waiting: list[Waiting] = []
    served, now_s = [], 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, coming[0].objective.arrived_s)
        while coming and coming[0].objective.arrived_s <= now_s:
            waiting.append(coming.pop(0))
        following = min(waiting, key=lambda w: (w.objective.counts_due_s(now_s), w.number))
        waiting.remove(following)
        served.append(Served(following, now_s, list(waiting)))
        now_s += following.objective.prefill_s
    return served


@given(st.lists(OBJECTIVES, max_size=40))
def test_of_two_that_can_be_in_time_the_first_due_is_served_first(
    drawn: list[tuple[float, int | None, int]],
) -> None:
    for served in serve(drawn):
        ours = served.request.objective
        for other in (waiting.objective for waiting in served.left):
            if ours.due_s is None or other.due_s is None:
                continue
            if ours.is_too_late(served.at_s) == other.is_too_late(served.at_s):
                assert ours.due_s <= other.due_s


@given(st.lists(OBJECTIVES, max_size=40))
def test_none_starves(drawn: list[tuple[float, int | None, int]]) -> None:
    """A request that arrives after another counts as due, even late, never goes before it."""
    for served in serve(drawn):
        arrived_s = served.request.objective.arrived_s
        for other in (waiting.objective for waiting in served.left):
            at_most_s = other.arrived_s + TTFT_DEFAULT_S
            if other.due_s is not None:
                at_most_s = other.due_s + LATE_GRACE_S
            assert arrived_s <= at_most_s
            assert at_most_s <= other.arrived_s + TTFT_MS_MAX / 1000 + LATE_GRACE_S


@given(st.lists(st.tuples(st.floats(0, 30), st.none(), st.integers(0, 8_000)), max_size=40))
def test_without_objectives_the_order_is_that_of_arrival(
    drawn: list[tuple[float, int | None, int]],
) -> None:
    numbers = [served.request.number for served in serve(drawn)]
    assert numbers == sorted(numbers)


def test_one_that_cannot_be_in_time_makes_way_and_goes_before_later_ones() -> None:
    late = ttft_objective(100.0, 1_000, prefill_ms=3_000)
    in_time = ttft_objective(101.0, 9_000, prefill_ms=3_000)
    later = ttft_objective(112.0, 1_000)
    assert late.is_too_late(100.0) and not in_time.is_too_late(101.0)
    assert in_time.counts_due_s(101.0) < late.counts_due_s(101.0) < later.counts_due_s(112.0)


def test_an_objective_that_cannot_be_met_gains_nothing() -> None:
    greedy, honest = ttft_objective(5.0, 1, prefill_ms=100), ttft_objective(5.0, None)
    assert greedy.counts_due_s(5.0) > honest.counts_due_s(5.0)
