"""Whom a router asks for the loads of all nodes."""

from collections import Counter
from collections.abc import Set

import pytest

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.pop_loads import GROUP_NODES_MAX
from router.decide.liveness.probe_plan import (
    FAILED_FOR_S,
    LOAD_AGE_MAX_MS,
    PING_ALL_NODES_MAX,
    TURN_S,
    GroupPlan,
    nodes_to_ping,
    plan_groups,
    unanswered,
)

INTERVAL_S = 2.0


def nodes(count: int, pops: int) -> dict[NodeId, PopId]:
    return {NodeId(f"n{n:05d}"): PopId(f"p{n % pops:03d}") for n in range(count)}


def plan(
    pops: dict[NodeId, PopId],
    *,
    router: str = "r1",
    failed: dict[NodeId, float] | None = None,
    now_s: float = 1000.0,
) -> GroupPlan:
    return plan_groups(pops, router=router, failed_at_s=failed or {}, now_s=now_s)


def pinged(
    fleet: dict[NodeId, PopId],
    *,
    used: Set[NodeId] = frozenset(),
    unanswered: Set[NodeId] = frozenset(),
    pinged_at_s: dict[NodeId, float] | None = None,
    now_s: float = 1000.0,
) -> set[NodeId]:
    recently = dict.fromkeys(fleet, now_s)
    return set(
        nodes_to_ping(
            fleet.keys(),
            used=used,
            unanswered=unanswered,
            pinged_at_s=recently if pinged_at_s is None else pinged_at_s,
            interval_s=INTERVAL_S,
            now_s=now_s,
        )
    )


def test_a_small_fleet_is_pinged_node_by_node() -> None:
    fleet = nodes(PING_ALL_NODES_MAX, 3)
    assert not plan(fleet).groups
    assert pinged(fleet) == set(fleet)


@pytest.mark.parametrize(("count", "pops"), [(257, 3), (5000, 190), (10_000, 190), (10_000, 1)])
def test_in_a_large_fleet_each_node_is_in_one_group_of_its_pop(count: int, pops: int) -> None:
    fleet = nodes(count, pops)
    made = plan(fleet)
    members = [node_id for group in made.groups for node_id in group.node_ids]
    assert sorted([*members, *made.alone]) == sorted(fleet)
    for group in made.groups:
        assert len(group.node_ids) <= GROUP_NODES_MAX
        assert len({fleet[node_id] for node_id in group.node_ids}) == 1
        assert set(group.answerers) <= set(group.node_ids)
        assert len(group.answerers) == 2
    assert len(made.groups) <= pops + count / GROUP_NODES_MAX + 1


def test_two_nodes_of_a_group_share_the_routers() -> None:
    fleet = nodes(640, 10)
    first: Counter[NodeId] = Counter()
    for router in range(400):
        group = plan(fleet, router=f"r{router}").groups[0]
        first[group.answerers[0]] += 1
    assert len(first) == 2
    assert min(first.values()) > 120


def test_a_node_that_failed_to_answer_is_replaced_for_a_while() -> None:
    fleet = nodes(640, 10)
    failed = plan(fleet).groups[0].answerers[0]
    later = plan(fleet, failed={failed: 1000.0}, now_s=1000.0 + FAILED_FOR_S - 0.1)
    assert failed not in later.groups[0].answerers
    assert len(later.groups[0].answerers) == 2
    again = plan(fleet, failed={failed: 1000.0}, now_s=1000.0 + FAILED_FOR_S)
    assert failed in again.groups[0].answerers


def test_nodes_of_which_none_can_answer_are_pinged() -> None:
    fleet = nodes(640, 10)
    pop = [node_id for node_id, name in fleet.items() if name == "p000"]
    made = plan(fleet, failed=dict.fromkeys(pop, 1000.0))
    assert set(made.alone) == set(pop)
    assert len(made.groups) == 9


def test_nodes_with_own_requests_and_unanswered_ones_are_pinged() -> None:
    fleet = nodes(640, 10)
    used = {NodeId("n00007"), NodeId("gone")}
    assert pinged(fleet, used=used) == {NodeId("n00007")}
    assert pinged(fleet, unanswered={NodeId("n00008")}) == {NodeId("n00008")}


def test_each_node_is_pinged_in_its_turn() -> None:
    fleet = nodes(10_000, 190)
    pinged_at_s: dict[NodeId, float] = {}
    now_s, most = 1000.0, 0
    while len(pinged_at_s) < len(fleet):
        turn = pinged(fleet, pinged_at_s=pinged_at_s, now_s=now_s)
        most = max(most, len(turn))
        pinged_at_s.update(dict.fromkeys(turn, now_s))
        now_s += INTERVAL_S
    assert now_s - 1000.0 <= TURN_S + INTERVAL_S
    assert most <= len(fleet) * INTERVAL_S / TURN_S + 1


def test_missing_and_old_loads_are_not_used() -> None:
    names = [NodeId(name) for name in ("fresh", "old", "odd", "missing")]
    ages_ms = dict(zip(names, (1.0, LOAD_AGE_MAX_MS + 1, float("nan")), strict=False))
    assert unanswered(names, ages_ms) == set(names[1:])
    assert unanswered(names[:1], {names[0]: -1.0}) == {names[0]}
