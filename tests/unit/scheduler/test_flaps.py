"""A replica that comes and goes: gone at once each time, and back later each time."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId
from isochrone.wire.routes import Route
from scheduler.decide.routing.flap_damping import (
    HELD_MAX_S,
    HELD_S,
    STEADY_S,
    DeparturesByReplica,
    damp_flaps,
)
from tests.unit.scheduler.test_steady import a_route, a_table

OTHER = a_route("r2")


def changes(every_s: float, for_s: float, *beside: Route) -> tuple[int, float]:
    """Let r1 come and go; return how often routers are told, and how long r1 serves."""
    told = a_table(a_route(), *beside)
    left: DeparturesByReplica = {}
    count, served_s = 0, 0.0
    for turn in range(int(for_s / every_s)):
        new = a_table(*((a_route(),) if turn % 2 else ()), *beside)
        table, _, left = damp_flaps(told, new, left, turn * every_s)
        count += table != told
        served_s += every_s * (len(table.routes) > len(beside))
        # One that left is never told as there.
        assert set(table.routes) <= set(new.routes)
        assert turn % 2 or len(table.routes) == len(beside)
        told = table
    return count, served_s


def test_who_leaves_once_is_back_at_once() -> None:
    gone, _, left = damp_flaps(a_table(a_route(), OTHER), a_table(OTHER), {}, 0.0)
    assert gone == a_table(OTHER)
    back, _, left = damp_flaps(gone, a_table(a_route(), OTHER), left, 0.1)
    assert back == a_table(a_route(), OTHER)


def test_who_flaps_five_times_a_second_changes_the_table_a_few_times_a_minute() -> None:
    assert changes(0.1, 60.0, OTHER)[0] <= 12
    # The only one of its deployment is not kept from it for longer than needed.
    assert changes(0.1, 60.0)[0] <= 2 * 60 / HELD_S
    count, _ = changes(0.1, 60.0)
    assert count >= 60 / HELD_S


@pytest.mark.parametrize("beside", [(), (OTHER,)])
def test_who_has_stayed_for_long_is_back_at_once(beside: tuple[Route, ...]) -> None:
    assert changes(STEADY_S, 20 * STEADY_S, *beside)[0] == 20


def test_who_is_back_for_good_waits_no_longer_than_the_most() -> None:
    told, now = a_table(OTHER, a_route()), 0.0
    left: DeparturesByReplica = {}
    for turn in range(200):
        told, _, left = damp_flaps(told, a_table(OTHER, *(a_route(),) * (turn % 2)), left, now)
        now += 0.1
    told, _, left = damp_flaps(told, a_table(OTHER), left, now)
    back = a_table(OTHER, a_route())
    assert damp_flaps(told, back, left, now + HELD_MAX_S)[0] == back


@given(st.lists(st.tuples(st.sets(st.sampled_from(["a", "b", "c"])), st.floats(0.0, 50.0))))
def test_no_route_is_told_that_is_not_there_and_others_are_left_alone(
    turns: list[tuple[set[str], float]],
) -> None:
    steady = a_route("s", deployment_id=DeploymentId("other"))
    told, now = a_table(steady), 0.0
    left: DeparturesByReplica = {}
    for names, after_s in turns:
        now += after_s
        new = a_table(steady, *(a_route(name) for name in sorted(names)))
        table, waiting, left = damp_flaps(told, new, left, now)
        assert bool(waiting) == (table != new)
        assert set(table.routes) <= set(new.routes)
        assert steady in table.routes
        assert msgspec.structs.replace(table, routes=new.routes) == new
        # Who has not just come is in no way concerned.
        assert set(told.routes) & set(new.routes) <= set(table.routes)
        told = table
