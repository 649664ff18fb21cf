"""A replica that flaps is withdrawn at once each time, and routed later each time."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId
from isochrone.wire.peers.routes import Route
from scheduler.decide.routing.flap_damping import (
    HOLD_MAX_S,
    HOLD_S,
    STEADY_S,
    DeparturesByReplica,
    damp_flaps,
)
from tests.unit.scheduler.test_unchanged_rates import a_route, a_table

OTHER = a_route("r2")


def changes(every_s: float, for_s: float, *others: Route) -> tuple[int, float]:
    """Let r1 flap; return how often a changed table is sent, and how long r1 serves."""
    sent = a_table(a_route(), *others)
    departures: DeparturesByReplica = {}
    count, served_s = 0, 0.0
    for turn in range(int(for_s / every_s)):
        new = a_table(*((a_route(),) if turn % 2 else ()), *others)
        table, _, departures = damp_flaps(sent, new, departures, turn * every_s)
        count += table != sent
        served_s += every_s * (len(table.routes) > len(others))
        # A replica that left is never in the table.
        assert set(table.routes) <= set(new.routes)
        assert turn % 2 or len(table.routes) == len(others)
        sent = table
    return count, served_s


def test_a_replica_that_left_once_is_routed_again_at_once() -> None:
    gone, _, departures = damp_flaps(a_table(a_route(), OTHER), a_table(OTHER), {}, 0.0)
    assert gone == a_table(OTHER)
    returned, _, departures = damp_flaps(gone, a_table(a_route(), OTHER), departures, 0.1)
    assert returned == a_table(a_route(), OTHER)


def test_a_replica_that_flaps_five_times_a_second_changes_the_table_rarely() -> None:
    assert changes(0.1, 60.0, OTHER)[0] <= 12
    # The only replica of a deployment does not wait longer than HOLD_S.
    assert changes(0.1, 60.0)[0] <= 2 * 60 / HOLD_S
    count, _ = changes(0.1, 60.0)
    assert count >= 60 / HOLD_S


@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_a_replica_that_was_stable_for_long_is_routed_at_once(others: tuple[Route, ...]) -> None:
    assert changes(STEADY_S, 20 * STEADY_S, *others)[0] == 20


def test_a_returned_replica_waits_at_most_the_maximum() -> None:
    sent, now = a_table(OTHER, a_route()), 0.0
    departures: DeparturesByReplica = {}
    for turn in range(200):
        sent, _, departures = damp_flaps(
            sent, a_table(OTHER, *(a_route(),) * (turn % 2)), departures, now
        )
        now += 0.1
    sent, _, departures = damp_flaps(sent, a_table(OTHER), departures, now)
    returned = a_table(OTHER, a_route())
    assert damp_flaps(sent, returned, departures, now + HOLD_MAX_S)[0] == returned


@given(st.lists(st.tuples(st.sets(st.sampled_from(["a", "b", "c"])), st.floats(0.0, 50.0))))
def test_damping_adds_no_route_and_leaves_others_unchanged(
    turns: list[tuple[set[str], float]],
) -> None:
    steady = a_route("s", deployment_id=DeploymentId("other"))
    sent, now = a_table(steady), 0.0
    departures: DeparturesByReplica = {}
    for names, after_s in turns:
        now += after_s
        new = a_table(steady, *(a_route(name) for name in sorted(names)))
        table, waiting, departures = damp_flaps(sent, new, departures, now)
        assert bool(waiting) == (table != new)
        assert set(table.routes) <= set(new.routes)
        assert steady in table.routes
        assert msgspec.structs.replace(table, routes=new.routes) == new
        # Routes that did not just return are unaffected.
        assert set(sent.routes) & set(new.routes) <= set(table.routes)
        sent = table
