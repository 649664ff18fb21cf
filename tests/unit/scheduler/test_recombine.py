"""Recombination: layouts of all deployments are chosen together, and fit on devices."""

from itertools import combinations, product

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeviceId
from ops.sim.optimality_gap import run_search, total_cost
from ops.sim.production_gap import carried_out, slots_held
from ops.sim.recost import empty_draft, recost, slots_of
from ops.sim.small_worlds import small_world
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.placement.search import layout_choice
from scheduler.decide.placement.search.effort import EffortBudget
from scheduler.decide.placement.search.greedy_fill import fill, keep_first
from scheduler.decide.placement.search.layouts import DeploymentLayouts, LayoutSite
from scheduler.decide.placement.search.local_search import LocalSearch
from scheduler.decide.placement.search.packing import (
    NodeMemory,
    PackedReplica,
    ReplicaSize,
    SitePacking,
)
from scheduler.decide.placement.search.recombine import DEVICES_MAX
from tests.builders import a_cluster, a_deployment, a_device, a_node
from tests.unit.scheduler.test_plan import after_plan

MANY = PlanLimits(starts_max=10**6, endings_max=10**6)


def a_packing(
    nodes: list[list[int]], sizes: list[ReplicaSize], eligible: list[set[int]] | None = None
) -> SitePacking:
    everywhere = set(range(len(nodes)))
    return SitePacking(
        [
            NodeMemory(
                a_node(f"n{number}", "ams"),
                tuple(DeviceId(f"g{at}") for at in range(len(free))),
                tuple(free),
            )
            for number, free in enumerate(nodes)
        ],
        sizes,
        [frozenset(numbers) for numbers in eligible or [everywhere] * len(sizes)],
    )


@pytest.mark.parametrize(
    ("nodes", "sizes", "counts", "fits"),
    [
        # Memory in total is enough for three, but each device can hold one.
        ([[48, 48]], [ReplicaSize(1, 30)], (2,), True),
        ([[48, 48]], [ReplicaSize(1, 30)], (3,), False),
        # Devices of one replica are on one node.
        ([[80], [80]], [ReplicaSize(2, 40)], (1,), False),
        ([[80], [80, 80]], [ReplicaSize(2, 40)], (2,), True),
        # The tightest devices would be wrong for the first: 30 + 20 and 40 + 10 fill both.
        ([[50, 50]], [ReplicaSize(1, n) for n in (40, 30, 20, 10)], (1, 1, 1, 1), True),
        ([[60, 50]], [ReplicaSize(1, 30), ReplicaSize(1, 25)], (2, 2), True),
    ],
)
def test_replicas_fit_if_any_choice_of_devices_has_enough_memory(
    nodes: list[list[int]], sizes: list[ReplicaSize], counts: tuple[int, ...], fits: bool
) -> None:
    assert (a_packing(nodes, sizes).pack(counts) is not None) == fits


def test_replicas_are_packed_only_on_nodes_that_may_take_them() -> None:
    size = ReplicaSize(1, 40)
    packing = a_packing([[80], [80]], [size, size], [{1}, {0, 1}])
    assert packing.most(0, 9) == 2
    assert packing.most(1, 9) == 4
    packed = packing.pack((2, 2))
    assert packed is not None
    assert {p.node.node_id for p in packed if p.deployment == 0} == {"n1"}
    assert packing.pack((3, 0)) is None


def test_replicas_so_small_that_millions_fit_are_counted_up_to_the_deployments_maximum() -> None:
    """Counting them all took longer than a planner has for a plan, so that none was made."""
    packing = a_packing([[10**15, 10**15]], [ReplicaSize(1, 1)])
    assert packing.most(0, 50) == 50


def test_few_choices_of_devices_are_compared_on_a_node_with_very_many() -> None:
    """There are ten million choices of eight devices among 32."""
    packing = a_packing([[40 + device for device in range(32)]], [ReplicaSize(8, 40)])
    packed = packing.pack((4,))
    assert packed is not None
    assert {len(replica.device_ids) for replica in packed} == {8}
    assert len({device for replica in packed for device in replica.device_ids}) == 32
    assert packing.pack((5,)) is None


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_packed_replicas_never_take_more_than_a_device_has(data: st.DataObject) -> None:
    free = data.draw(
        st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=2)
    )
    sizes = data.draw(
        st.lists(
            st.builds(ReplicaSize, st.integers(1, 2), st.integers(1, 9)), min_size=1, max_size=2
        )
    )
    packing = a_packing(free, sizes)
    most = [packing.most(number, 9) for number in range(len(sizes))]
    for counts in product(*(range(min(count, 2) + 2) for count in most)):
        packed = packing.pack(counts)
        items = [number for number, count in enumerate(counts) for _ in range(count)]
        assert (packed is not None) == fits_somehow(free, [sizes[number] for number in items])
        if packed is not None:
            assert all(count <= limit for count, limit in zip(counts, most, strict=True))
            assert not over_full(free, sizes, packed)
            assert sorted(p.deployment for p in packed) == items


def fits_somehow(free: list[list[int]], items: list[ReplicaSize]) -> bool:
    """Return whether replicas fit on nodes, by trying all devices."""
    if not items:
        return True
    count, memory = items[0]
    for node, devices in enumerate(free):
        for chosen in combinations(range(len(devices)), count):
            if all(devices[device] >= memory for device in chosen):
                left = [list(each) for each in free]
                for device in chosen:
                    left[node][device] -= memory
                if fits_somehow(left, items[1:]):
                    return True
    return False


def over_full(
    free: list[list[int]], sizes: list[ReplicaSize], packed: list[PackedReplica]
) -> list[tuple[str, str]]:
    taken: dict[tuple[str, str], int] = {}
    for replica in packed:
        assert len(set(replica.device_ids)) == sizes[replica.deployment].devices
        for device_id in replica.device_ids:
            key = str(replica.node.node_id), str(device_id)
            taken[key] = taken.get(key, 0) + sizes[replica.deployment].memory_bytes
    return [
        (node, device)
        for (node, device), used in taken.items()
        if used > free[int(node[1:])][int(device[1:])]
    ]


def test_the_cost_of_a_layout_is_that_of_its_replicas_on_the_draft() -> None:
    draft = empty_draft(small_world(3), MANY)
    fill(draft)
    count = len(draft.fleet.sites)
    for state in draft.states:
        layout = tuple(
            sum(replica.site == site for replica in state.replicas) for site in range(count)
        )
        starts = sum(replica.start_cost for replica in state.replicas)
        cost = state.cost() - starts
        for replica in state.new_replicas():
            draft.remove(replica)
        sites = [LayoutSite(at, site.pop, 99, 0.0) for at, site in enumerate(draft.fleet.sites)]
        layouts = DeploymentLayouts(state, sites, np.zeros((2, count)))
        assert layouts.cost(layout) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("seed", "optimum"),
    [
        # Another replica of d1 needs five others of three deployments to move in three PoPs.
        (94_619, 13_645.0),
        # A second replica of two devices displaces two others at once, which displace three more.
        (120_454, 2_149.7),
        # Five deployments have replicas on one node of four devices, with different ones elsewhere.
        (428_508, 78_955.2),
    ],
)
def test_recombination_finds_chains_of_moves_through_several_sites(
    seed: int, optimum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_choice, "CHOICES_MAX", 25)
    limits = msgspec.structs.replace(MANY, effort=100)
    world = small_world(seed)
    draft, _ = run_search(world, limits)
    assert total_cost(draft) > 1.05 * optimum
    assert LocalSearch(draft, limits.settle_s, effort=1_000).recombination.run()
    assert total_cost(draft) <= 1.01 * optimum
    assert min(draft.ledger.free.values()) >= 0


def test_recombination_that_finds_nothing_leaves_the_draft_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout_choice, "CHOICES_MAX", 3)
    draft, _ = run_search(small_world(938_446), msgspec.structs.replace(MANY, effort=100))
    cost, slots, free = total_cost(draft), slots_of(draft), dict(draft.ledger.free)
    assert not LocalSearch(draft, 300.0, effort=1_000).recombination.run()
    assert total_cost(draft) == pytest.approx(cost)
    assert sorted(slots_of(draft)) == sorted(slots)
    assert draft.ledger.free == free


def test_the_plans_of_a_live_small_fleet_find_what_recombination_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second replica of two devices displaces two others at once, which displace three more."""
    monkeypatch.setattr(layout_choice, "CHOICES_MAX", 25)
    world, optimum = small_world(120_454), 2_149.7
    costs = []
    for thorough_effort in (0, PlanLimits().thorough_effort):
        fleet = carried_out(world, PlanLimits(thorough_effort=thorough_effort))
        costs.append(total_cost(recost(world, slots_held(fleet.cluster))))
    assert costs[0] > 1.05 * optimum
    assert costs[1] <= 1.01 * optimum


@pytest.mark.parametrize(
    ("replicas_min", "devices", "attempts"),
    [
        (2, 4, [PlanLimits().thorough_effort]),
        # One replica has been tried at every site.
        (1, 4, []),
        # Too large: a layout would take too long to look at.
        (2, DEVICES_MAX // 2 + 1, []),
    ],
)
def test_a_small_fleet_that_starts_several_replicas_is_planned_thoroughly(
    replicas_min: int, devices: int, attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    monkeypatch.setattr(EffortBudget, "add", lambda _, attempts: added.append(attempts))
    cluster = a_cluster(
        nodes=tuple(
            a_node(
                f"{pop}-1", pop, devices=tuple(a_device(8.0, f"gpu{at}") for at in range(devices))
            )
            for pop in ("ams", "iad")
        ),
        deployments=(a_deployment(replicas_min=replicas_min),),
    )
    plan = plan_deployments(cluster)
    assert len(plan.starts) == replicas_min
    assert added == attempts


# Two sites save the same, but for rounding.
@example(seed=1, starts_max=7)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 400), starts_max=st.integers(0, 20))
def test_what_a_plan_may_start_first_is_what_a_fill_would_take_first(
    seed: int, starts_max: int
) -> None:
    draft = empty_draft(small_world(seed), MANY)
    fill(draft)
    whole = sorted(slots_of(draft))
    keep_first(draft, starts_max)
    kept = sorted(slots_of(draft))
    assert len(kept) == min(starts_max, len(whole))
    assert set(kept) <= set(whole)
    assert draft.has_starts_left == (len(whole) < starts_max)
    filled = empty_draft(small_world(seed), PlanLimits(starts_max=starts_max))
    fill(filled)
    # Which of two equal sites, or of two like devices of one, may differ.
    assert total_cost(draft) == pytest.approx(total_cost(filled), rel=1e-4)


def test_a_plan_with_little_effort_is_not_recombined() -> None:
    draft = empty_draft(small_world(120_454), MANY)
    fill(draft)
    slots = slots_of(draft)
    assert not LocalSearch(draft, 300.0, effort=999).recombination.run()
    assert slots_of(draft) == slots


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 400), running=st.integers(0, 4), starts_max=st.integers(1, 12))
def test_recombination_keeps_what_runs_and_starts_no_more_than_it_may(
    seed: int, running: int, starts_max: int
) -> None:
    world = small_world(seed)
    first = PlanLimits(starts_max=running, effort=0, thorough_effort=0)
    world = after_plan(world, plan_deployments(world, first))
    draft = empty_draft(world, msgspec.structs.replace(MANY, starts_max=starts_max))
    fill(draft)
    kept = [r.placement for state in draft.states for r in state.replicas if r.placement]
    assert len(kept) == len(world.placements)
    before = total_cost(draft)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_choice, "CHOICES_MAX", 8)
        patch.setattr(layout_choice, "SMALL_MAX", 60)
        lowered = LocalSearch(draft, 300.0, effort=1_000).recombination.run()
    after = total_cost(draft)
    assert after < before if lowered else after == pytest.approx(before)
    now = [r.placement for state in draft.states for r in state.replicas if r.placement]
    assert now == kept
    assert sum(len(state.new_replicas()) for state in draft.states) <= starts_max
    assert all(len(state.replicas) <= state.needs.replicas_max for state in draft.states)
    assert min(draft.ledger.free.values()) >= 0
