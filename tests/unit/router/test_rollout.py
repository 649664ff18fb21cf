"""The draw between two versions of a rollout, and what is counted for both."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, ModelId, NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import DeploymentEntry, RolloutEntry, Route
from router.decide.routes.rollout import ROWS_MAX, TrialCounter, VersionDraw, draw_version

AMS, SIN = PopId("ams"), PopId("sin")


def an_entry(share: float = 0.25, **fields: Any) -> DeploymentEntry:
    return DeploymentEntry(
        deployment_id=DeploymentId("d"),
        name="d",
        model_id=ModelId("m"),
        context_tokens=10,
        rollout=RolloutEntry(version=2, share=share, **fields),
    )


def a_route(name: str, version: int, pop: PopId = AMS) -> Route:
    return Route(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("d"),
        version=version,
        node_id=NodeId("n"),
        pop=pop,
        address="",
    )


ROUTES = [a_route("o1", 1), a_route("o2", 1), a_route("n1", 2)]
TO_NEW = VersionDraw(frozenset({ReplicaId("o1"), ReplicaId("o2")}), True)
TO_OLD = VersionDraw(frozenset({ReplicaId("n1")}), False)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.9])
def test_the_share_is_kept(share: float) -> None:
    drawn = [draw_version(an_entry(share), f"q{n}", AMS, ROUTES) for n in range(20_000)]
    assert drawn.count(TO_NEW) + drawn.count(TO_OLD) == len(drawn)
    assert drawn.count(TO_NEW) / len(drawn) == pytest.approx(share, abs=0.01)


def test_a_session_on_the_new_version_stays_there_as_the_share_grows() -> None:
    for n in range(500):
        drawn = [draw_version(an_entry(share), f"s{n}", AMS, ROUTES) for share in (0.05, 0.25, 0.9)]
        assert drawn == sorted(drawn, key=lambda draw: draw.may_fall_back)


def test_a_pop_outside_the_rollout_gets_only_the_old_version() -> None:
    entry = an_entry(0.9, pops=(SIN,))
    assert {draw_version(entry, f"q{n}", AMS, ROUTES) for n in range(50)} == {TO_OLD}


def test_a_version_that_was_rolled_back_gets_only_what_the_old_one_cannot_take() -> None:
    draws = {draw_version(an_entry(0.0), f"q{n}", AMS, ROUTES) for n in range(500)}
    assert draws == {VersionDraw(TO_OLD.excluded, True)}


@pytest.mark.parametrize("routes", [ROUTES[:2], ROUTES[2:], []])
def test_a_single_version_serves_all_requests(routes: list[Route]) -> None:
    assert {draw_version(an_entry(), f"q{n}", AMS, routes) for n in range(50)} == {
        VersionDraw(frozenset(), False)
    }


def test_without_a_rollout_no_replica_is_excluded_and_nothing_counted() -> None:
    entry = msgspec.structs.replace(an_entry(), rollout=None)
    assert draw_version(entry, "q", AMS, ROUTES) == VersionDraw(frozenset(), False)
    trials = TrialCounter(AMS)
    trials.record_attempt(entry, ROUTES[0], failed=True)
    assert trials.take() == ()


def test_attempts_and_times_are_summed_by_version_and_pop() -> None:
    trials = TrialCounter(SIN)
    entry = an_entry()
    trials.record_attempt(entry, ROUTES[0], failed=False, ttft_ms=100.0, itl_ms=10.0)
    trials.record_attempt(entry, ROUTES[1], failed=True)
    trials.record_attempt(entry, ROUTES[2], failed=True)
    old, new = trials.take()
    assert (old.version, old.pop, old.asked_pop) == (1, AMS, SIN)
    assert (old.attempts, old.failures, old.ttft.count, old.itl.count) == (2, 1, 1, 1)
    assert old.ttft.total == pytest.approx(4.605, abs=0.001)
    assert old.itl.squares == pytest.approx(2.3026**2, abs=0.001)
    assert (new.version, new.attempts, new.failures, new.ttft.count) == (2, 1, 1, 0)
    assert trials.take() == ()


def test_the_number_of_rows_is_bounded() -> None:
    trials = TrialCounter(SIN)
    for version in range(ROWS_MAX + 10):
        trials.record_attempt(an_entry(), a_route("r", version), failed=True)
    assert len(trials.take()) == ROWS_MAX
