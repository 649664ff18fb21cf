"""The life of an attempt: the table of transitions, and what no order of events can do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from router.decide.attempt import (
    FAULTY,
    TRANSITIONS,
    AttemptEvent,
    AttemptState,
    FailedAttempts,
    FailureCause,
    ImpossibleAttemptEvent,
    NoNodeReached,
    after,
    event_of,
)

S, E = AttemptState, AttemptEvent


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ((E.SENT, E.ANSWERED, E.COMPLETED), S.COMPLETED),
        ((E.SENT, E.HANDED_OFF, E.ANSWERED, E.COMPLETED), S.COMPLETED),
        ((E.SENT, E.REFUSED), S.REFUSED),
        ((E.SENT, E.HANDED_OFF, E.REFUSED), S.REFUSED),
        ((E.SENT, E.FAILED), S.FAILED),
        ((E.SENT, E.ANSWERED, E.FAILED), S.INTERRUPTED),
        ((E.SENT, E.ANSWERED, E.FAILED, E.RESUMED), S.RESUMED),
    ],
)
def test_each_course_of_an_attempt_ends_in_its_state(
    events: tuple[AttemptEvent, ...], end: AttemptState
) -> None:
    state = S.RANKED
    for event in events:
        state = after(state, event)
    assert state is end


@given(st.lists(st.sampled_from(AttemptEvent)))
def test_in_any_order_of_events_an_attempt_is_sent_answered_and_ended_at_most_once(
    events: list[AttemptEvent],
) -> None:
    state, accepted = S.RANKED, []
    for event in events:
        if (state, event) not in TRANSITIONS:
            with pytest.raises(ImpossibleAttemptEvent):
                after(state, event)
            continue
        state = after(state, event)
        accepted.append(event)
    for event in set(E) - {E.HANDED_OFF}:
        assert accepted.count(event) <= 1
    # The attempt broke if and only if its state says so: that is when it was counted as a failure.
    assert (E.FAILED in accepted) == (state in FAULTY)
    # Only one of these can end an attempt.
    assert sum(event in accepted for event in (E.COMPLETED, E.REFUSED, E.FAILED)) <= 1
    if E.RESUMED in accepted:
        assert accepted[-3:] == [E.ANSWERED, E.FAILED, E.RESUMED]


def test_every_state_can_be_reached_and_only_the_last_ones_take_no_event() -> None:
    assert {S.RANKED, *TRANSITIONS.values()} == set(S)
    ends = set(S) - {state for state, _ in TRANSITIONS}
    assert ends == {S.REFUSED, S.FAILED, S.RESUMED, S.COMPLETED}


def test_only_refusals_cost_no_retry() -> None:
    refusals = {cause for cause in FailureCause if event_of(cause) is E.REFUSED}
    ours = FailureCause.EXHAUSTED
    assert refusals == {FailureCause.REFUSED, FailureCause.CANNOT_RESUME, ours}


@pytest.mark.parametrize(
    ("causes", "kind"),
    [
        ((FailureCause.UNREACHABLE, FailureCause.GONE), NoNodeReached),
        ((FailureCause.UNREACHABLE, FailureCause.SILENT), ApiError),
        ((FailureCause.ENGINE_LOST,), ApiError),
    ],
    ids=["nodes", "a node and a replica", "an engine"],
)
def test_a_request_is_not_the_cause_if_only_nodes_failed(
    causes: tuple[FailureCause, ...], kind: type[ApiError]
) -> None:
    failed = FailedAttempts()
    for at_s, cause in enumerate(causes, 1):
        failed.record(cause, float(at_s))
    error = failed.as_error(ValueError("no answer"))
    assert type(error) is kind
    assert f"{len(causes)} attempts failed, the last: no answer" in error.message
    assert (failed.count, failed.last_at_s) == (len(causes), float(len(causes)))
