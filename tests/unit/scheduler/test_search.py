"""The search behind a plan: exact assignments, scarcity, roles, preemption, refusals."""

import csv
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, Generation, PopId
from isochrone.wire.models.model import EngineSettings, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from ops.sim import small_worlds
from ops.sim.optimality_gap import TABLE, run_search, total_cost
from ops.sim.recost import empty_draft
from ops.sim.small_worlds import small_world
from scheduler.decide.cluster import ClusterState, DemandRate, PlacementPlan
from scheduler.decide.demand.demand_rates import raise_to_forecast
from scheduler.decide.placement.fleet.latency_table import LatencyTable
from scheduler.decide.placement.fleet.slots import free_memory, residency_allows
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.placement.search import local_search, recombine
from scheduler.decide.placement.search.blocked_gains import BlockedGain
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.load_assignment import LoadAssignment
from scheduler.decide.placement.search.local_search import LocalSearch
from scheduler.decide.whatif import explain_placement
from tests.builders import a_cluster, a_deployment, a_device, a_model, a_node, a_placement
from tests.unit.scheduler.test_plan import a_demand, after_plan, starts

MANY = PlanLimits(starts_max=10**6, endings_max=10**6)
BRIEF = msgspec.structs.replace(MANY, thorough_effort=100)


def test_an_assignment_is_the_cheapest_and_gains_and_losses_are_exact() -> None:
    far = np.array([[1.0, 50.0], [2.0, 100.0], [3.0, 9.0]])
    ones = np.ones(3)
    assignment = LoadAssignment(ones, ones, LatencyTable(far), np.array([2.0, 1.0]), 5000.0)
    # The third city moves to the other site: it loses tiny.
    assert assignment.cost() == pytest.approx(1 + 2 + 9)
    assert assignment.gain(0, 1.0) == pytest.approx(6.0)
    assert assignment.loss(1, 1.0) == pytest.approx(5000 - 9)
    assert assignment.unserved() == 0


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_an_assignment_keeps_all_load_and_never_exceeds_capacity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cities, sites = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    load = rng.exponential(1.0, cities) + 0.01
    assignment = LoadAssignment(
        load * 2,
        load,
        LatencyTable(rng.uniform(1, 300, (cities, sites))),
        np.zeros(sites),
        5000.0,
    )
    held: list[tuple[int, float]] = []
    for _ in range(12):
        before = assignment.cost()
        if held and rng.random() < 0.4:
            site, capacity = held.pop(int(rng.integers(len(held))))
            bound, loss = (
                assignment.loss_lower_bound(site, capacity),
                assignment.loss(site, capacity),
            )
            assignment.remove_capacity(site, capacity)
            assert assignment.cost() - before == pytest.approx(loss, abs=1e-6)
            assert -1e-6 <= bound <= loss + 1e-6
        else:
            site, capacity = int(rng.integers(sites)), float(rng.uniform(0.1, 2.0))
            gain = assignment.gain(site, capacity)
            assignment.add_capacity(site, capacity)
            held.append((site, capacity))
            assert before - assignment.cost() == pytest.approx(gain, abs=1e-6)
        assert (assignment.used() <= assignment.capacity + 1e-6).all()
        assert assignment.used().sum() + assignment.unserved() == pytest.approx(load.sum())


def optima() -> list[tuple[int, float]]:
    with TABLE.open() as file:
        return [(int(row["seed"]), float(row["optimum"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("seed", "optimum"), optima()[10:80:25])
def test_small_worlds_are_planned_within_one_percent_of_the_optimum(
    seed: int, optimum: float
) -> None:
    draft, greedy = run_search(small_world(seed))
    assert total_cost(draft) <= greedy + 1e-6
    assert total_cost(draft) <= 1.01 * optimum


def test_a_rounding_error_at_a_site_without_capacity_does_not_end_the_search() -> None:
    limits = PlanLimits(starts_max=10**6, endings_max=10**6, effort=1_500)
    draft, greedy = run_search(small_world(223), limits)
    assert total_cost(draft) <= 0.5 * greedy


def test_a_deployment_at_its_maximum_moves_two_replicas_to_a_site_that_others_leave() -> None:
    draft, _ = run_search(small_world(1009))
    assert total_cost(draft) <= 1.01 * 100_615.3


@pytest.mark.parametrize(
    ("seed", "optimum"),
    [
        # A replica of four devices and ten small ones on another node of four trade places.
        (754_430, 49_961.3),
        # Replicas of two deployments trade sites in one PoP, so that they can in another.
        (570_038, 3_477.8),
        # Replicas of four and of two devices trade nodes that small ones have to leave.
        (108_252, 28_199.7),
    ],
)
def test_exchanges_leave_minima_that_no_move_or_swap_leaves(seed: int, optimum: float) -> None:
    limits = PlanLimits(starts_max=10**6, endings_max=10**6, effort=100)
    draft, _ = run_search(small_world(seed), limits)
    assert total_cost(draft) > 1.01 * optimum
    search = LocalSearch(draft, limits.settle_s, effort=2_000)
    while total_cost(draft) > 1.01 * optimum and search.exchange.run():
        pass
    assert total_cost(draft) <= 1.01 * optimum


def test_a_large_replica_leaves_its_site_to_small_ones_of_others() -> None:
    """One of 36 GiB gives a device to two of 18 GiB, and takes three devices of others instead."""
    limits = PlanLimits(starts_max=10**6, endings_max=10**6, effort=100)
    draft, _ = run_search(small_world(275_668), limits)
    assert total_cost(draft) > 1.01 * 5_287.5
    search = LocalSearch(draft, limits.settle_s, effort=2_000)
    force_off = search._perturbation._force_off_sites
    while total_cost(draft) > 1.01 * 5_287.5 and any(map(force_off, draft.largest_first())):
        pass
    assert total_cost(draft) <= 1.01 * 5_287.5


def test_a_plan_that_starts_nothing_fills_the_draft_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (a_node("ams-1", "ams"), a_node("iad-1", "iad"))
    cluster = a_cluster(nodes=nodes, deployments=(a_deployment(replicas_min=2),))
    cluster = after_plan(cluster, plan_deployments(cluster))
    fills = []
    monkeypatch.setattr(local_search, "fill", lambda draft, *_: fills.append(draft))
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert not plan.endings
    assert len(fills) == 1


@pytest.mark.parametrize(
    ("age_s", "devices", "expected"),
    [(60.0, 150, [("d", "sin-1")]), (10_000.0, 150, []), (60.0, 1, [])],
    ids=["new in a large fleet", "laid out", "new in a small fleet"],
)
def test_a_new_deployment_of_a_large_fleet_starts_also_what_does_not_pay_its_start(
    age_s: float, devices: int, expected: list[tuple[str, str]]
) -> None:
    cpus = tuple(a_device(8.0, f"cpu{number}") for number in range(devices))
    cluster = a_cluster(
        nodes=(
            a_node("ams-1", "ams", devices=cpus),
            a_node("iad-1", "iad"),
            a_node("sin-1", "sin"),
        ),
        placements=(
            a_placement("r1", "ams-1", age_s=age_s),
            a_placement("r2", "iad-1", age_s=age_s),
        ),
        demand=(a_demand("sin", 0.1),),
    )
    plan = plan_deployments(cluster)
    assert starts(plan) == expected
    # What was started stays, as it saves more than it costs to keep.
    later = plan_deployments(after_plan(cluster, plan))
    assert not later.starts
    assert not later.endings


def test_a_displaced_replica_displaces_others_at_another_site_than_the_one_it_left() -> None:
    # A replica of four devices displaces one, whose best site is then full of it.
    limits = PlanLimits(starts_max=10**6, endings_max=10**6, effort=1_000)
    draft, _ = run_search(small_world(621_961), limits)
    assert total_cost(draft) <= 1.01 * 10_801.2


def test_exchanges_do_not_look_at_each_two_of_many_deployments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 60
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("iad-1", "iad")),
        deployments=tuple(a_deployment(f"d{number}", replicas_max=0) for number in range(count)),
    )
    draft = empty_draft(cluster, PlanLimits())
    reads: list[DeploymentState] = []
    read = DeploymentState.new_replicas

    def counted(state: DeploymentState) -> list[PlannedReplica]:
        reads.append(state)
        return read(state)

    monkeypatch.setattr(DeploymentState, "new_replicas", counted)
    assert not LocalSearch(draft, settle_s=300.0, effort=60).exchange.run()
    assert len(reads) <= 10 * count


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 400), effort=st.integers(0, 20))
def test_bounds_of_all_sites_agree_with_those_of_one(seed: int, effort: int) -> None:
    limits = PlanLimits(starts_max=20, endings_max=10**6, effort=effort)
    draft, _ = run_search(small_world(seed), limits)
    for state in draft.states:
        needs, required = state.needs, state.needs_by_site()
        bounds, is_free = state.gain_upper_bounds(), draft.has_free_devices(state)
        least = float(np.median(bounds))
        higher = state.gain_upper_bounds(least)
        assert higher == pytest.approx(np.maximum(bounds, least))
        assert bounds.max(initial=0.0) <= state.assignment.gain_limit(needs.nearest_ms) + 1e-6
        soonest = draft.fleet.start_bounds.start_s(needs.model)
        for site in np.flatnonzero(needs.site_capacity > 0).tolist():
            need = draft.need_at(state, site)
            assert (required.tiers[site], required.worths[site]) == (need.tier, need.worth)
            gain = draft.gain_at(state, site)
            assert gain.saves <= bounds[site] + 1e-6
            if gain.candidate:
                assert is_free[site]
                assert gain.candidate.start_s >= soonest[site] - 1e-9


def test_blocked_gains_come_largest_first_as_they_are_when_asked_for() -> None:
    draft, _ = run_search(small_world(9), PlanLimits(starts_max=10**6, effort=0))
    first, second = draft.states[:2]
    nets = {(0, 1): 5.0, (0, 2): -1.0, (1, 0): 7.0, (1, 3): 20.0}
    bounds = np.full(len(first.needs.site_capacity), -np.inf)
    draft.blocked.clear()
    draft.blocked.note_all(first, bounds.copy())
    for site in (1, 2):
        draft.blocked.note(first, site, 30.0)
    for site in (0, 3):
        draft.blocked.note(second, site, 20.0)
    drained = draft.blocked.drain(
        [first, second],
        [BlockedGain(state=second, site=2, net=6.0)],
        lambda state, site: nets[state.number, site],
    )
    assert [(gain.state.number, gain.site, gain.net) for gain in drained] == [
        *((1, 3, 20.0), (1, 0, 7.0)),
        *((1, 2, 6.0), (0, 1, 5.0)),
    ]
    assert not list(draft.blocked.drain([first, second], [], lambda _state, _site: 1.0))


def a_brief_plan(cluster: ClusterState) -> PlacementPlan:
    """Return a plan that recombines, and tries little besides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recombine, "EFFORT_MIN", BRIEF.thorough_effort)
        return plan_deployments(cluster, BRIEF)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 400))
def test_a_first_plan_respects_memory_residency_and_limits(seed: int) -> None:
    cluster = small_world(seed)
    after = after_plan(cluster, a_brief_plan(cluster))
    pops = {node.node_id: node.pop for node in cluster.nodes}
    countries = {pop.pop: pop for pop in cluster.pops}
    policies = {d.deployment_id: d.policy for d in cluster.deployments}
    assert all(left >= 0 for left in free_memory(after.nodes, after.placements).values())
    for placement in after.placements:
        policy = policies[placement.deployment_id]
        assert residency_allows(policy, countries[pops[placement.node_id]])
    unmet = {row.deployment_id for row in a_brief_plan(after).unmet}
    for deployment in cluster.deployments:
        mine = [p for p in after.placements if p.deployment_id == deployment.deployment_id]
        assert len(mine) <= deployment.policy.replicas_max
        if deployment.deployment_id not in unmet:
            assert len(mine) >= deployment.policy.replicas_min


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 400), times=st.floats(0.98, 1.02))
def test_a_small_change_of_demand_makes_few_moves(seed: int, times: float) -> None:
    cluster = small_world(seed)
    for _ in range(12):
        plan = a_brief_plan(cluster)
        if not plan.starts and not plan.endings:
            break
        cluster = after_plan(cluster, plan)
    demand = tuple(
        msgspec.structs.replace(row, requests_per_s=row.requests_per_s * times)
        for row in cluster.demand
    )
    changed = msgspec.structs.replace(
        cluster, demand=demand, generation=Generation(cluster.generation + 1)
    )
    plan = a_brief_plan(changed)
    assert a_brief_plan(changed) == plan
    assert len(plan.starts) + len(plan.endings) <= 2 + len(cluster.placements) // 10


def test_the_spread_keeps_a_replica_when_a_pop_is_lost() -> None:
    nodes = (a_node("ams-1", "ams"), a_node("ams-2", "ams"), a_node("fra-1", "fra"))
    busy = a_cluster(
        nodes=nodes, placements=(a_placement("r1", "ams-1"),), demand=(a_demand("ams", 3.0),)
    )
    assert starts(plan_deployments(busy)) == [("d", "fra-1")]
    quiet = msgspec.structs.replace(busy, demand=(a_demand("ams", 0.05),))
    assert not plan_deployments(quiet).starts


def test_replicas_of_one_pop_avoid_a_shared_failure_domain() -> None:
    nodes = (
        a_node("ams-1", "ams", failure_domain="rack-a"),
        a_node("ams-2", "ams", failure_domain="rack-a"),
        a_node("ams-3", "ams", failure_domain="rack-b"),
    )
    cluster = a_cluster(
        nodes=nodes,
        deployments=(a_deployment(replicas_min=2),),
        placements=(a_placement("r1", "ams-1"),),
    )
    assert starts(plan_deployments(cluster)) == [("d", "ams-3")]


def test_scarce_capacity_goes_by_priority_and_to_first_replicas_before_second_ones() -> None:
    deployments = (
        a_deployment("low", replicas_min=0, priority=40),
        a_deployment("high", replicas_min=0, priority=60),
    )
    demand = (a_demand("ams", 5.0, "low"), a_demand("ams", 5.0, "high"))
    two = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=2.6),), deployments=deployments, demand=demand
    )
    assert {name for name, _ in starts(plan_deployments(two))} == {"low", "high"}
    one = msgspec.structs.replace(two, nodes=(a_node("ams-1", "ams", gib=1.3),))
    assert starts(plan_deployments(one)) == [("high", "ams-1")]
    assert "100 % of the demand has no capacity" in plan_deployments(one).unmet[0].reason


def test_an_idle_replica_is_preempted_and_not_started_there_again() -> None:
    idle = a_placement("r1", "ams-1", deployment="idle")
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=1.3), a_node("sin-1", "sin", gib=1.3)),
        deployments=(a_deployment("idle", replicas_min=0), a_deployment("busy", replicas_min=0)),
        placements=(idle, a_placement("r2", "sin-1", deployment="idle")),
        demand=(a_demand("ams", 0.05, "idle"), a_demand("ams", 4.0, "busy")),
    )
    first = plan_deployments(cluster)
    assert [ending.replica_id for ending in first.endings] == ["r1"]
    assert "its slot in ams would save" in first.endings[0].reason
    ending = msgspec.structs.replace(
        cluster,
        placements=(msgspec.structs.replace(idle, is_ending=True), *cluster.placements[1:]),
    )
    assert plan_deployments(ending) == msgspec.structs.replace(
        plan_deployments(ending), starts=(), endings=()
    )
    freed = msgspec.structs.replace(cluster, placements=cluster.placements[1:])
    assert ("busy", "ams-1") in starts(plan_deployments(freed))


def test_a_node_that_holds_the_weights_starts_sooner() -> None:
    model = small_worlds.a_model("m", 4.0)
    nodes = (a_node("ams-1", "ams"), a_node("ams-2", "ams", artifacts=(model.artifact.digest,)))
    cluster = a_cluster(nodes=nodes, models=(model,))
    assert starts(plan_deployments(cluster)) == [("d", "ams-2")]


@pytest.mark.parametrize("policy", [{"roles": "prefill=1,decode=2"}, {"prefill_share": 0.34}])
def test_roles_split_the_replicas_of_a_pop(policy: dict[str, Any]) -> None:
    deployment = msgspec.structs.replace(
        a_deployment(), policy=PlacementPolicy(replicas_min=3, **policy)
    )
    held = (a_placement("r1", "ams-1"), a_placement("r2", "ams-1", role=Role.PREFILL))
    cluster = a_cluster(nodes=(a_node("ams-1", "ams"),), deployments=(deployment,), placements=held)
    assert plan_deployments(cluster).starts[0].spec.role is Role.DECODE
    one = msgspec.structs.replace(cluster, placements=held[:1])
    assert [start.spec.role for start in plan_deployments(one).starts] == [
        Role.PREFILL,
        Role.DECODE,
    ]
    # Replicas of one plan count for each other.
    none = msgspec.structs.replace(cluster, placements=())
    roles = [start.spec.role for start in plan_deployments(none).starts]
    assert roles == [Role.UNIFIED, Role.PREFILL, Role.DECODE]


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        (a_deployment(replicas_min=5, replicas_max=2), "replicas_min 5 is over replicas_max 2"),
        (a_deployment(allow=("NL",), deny=("NL",)), "together leave no PoP"),
        (a_deployment(keep_warm=("xyz",)), "which is not a PoP"),
        (a_deployment(keep_warm=("ams",), deny=("NL",)), "where allow and deny permit no replica"),
        (a_deployment(model="gone"), "no model gone"),
    ],
)
def test_contradictory_policies_are_reported_and_break_nothing(
    deployment: object, words: str
) -> None:
    cluster = a_cluster(nodes=(a_node("ams-1", "ams"),), deployments=(deployment,))
    assert any(words in row.reason for row in plan_deployments(cluster).unmet)


def test_a_model_that_can_never_fit_is_refused_with_the_sum() -> None:
    gpu = msgspec.structs.replace(a_device(79.0, "gpu0"), device_class="h100-80g")
    engine = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=1)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=(gpu,)),),
        models=(a_model("m", 500.0),),
        deployments=(a_deployment(engine=engine),),
    )
    reason = plan_deployments(cluster).unmet[0].reason
    assert "weights 500.00 GiB / 1 = 500.00 GiB" in reason
    assert "8 such devices would hold it" in reason


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-12])
def test_tiny_demand_causes_no_division_error(tiny: float) -> None:
    row = DemandRate(
        deployment_id=DeploymentId("d"),
        pop=PopId("sin"),
        requests_per_s=tiny,
        refused_per_s=3.0,
        uncached_tokens_per_s=tiny,
        output_tokens_per_s=tiny,
    )
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("sin-1", "sin")),
        placements=(a_placement("r1", "ams-1"),),
        demand=raise_to_forecast((row,), []),
    )
    # Refused requests count as demand, however few were answered.
    assert starts(plan_deployments(cluster)) == [("d", "sin-1")]
    negligible = msgspec.structs.replace(row, refused_per_s=0.0)
    assert not plan_deployments(msgspec.structs.replace(cluster, demand=(negligible,))).starts


def test_more_devices_than_a_node_has_are_refused_with_settings_that_fit() -> None:
    gpus = tuple(
        msgspec.structs.replace(a_device(79.0, f"gpu{number}"), device_class="h100-80g")
        for number in range(2)
    )
    engine = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=4)

    def reason(gib: float) -> str:
        cluster = a_cluster(
            nodes=tuple(a_node(f"ams-{n}", "ams", devices=gpus) for n in (1, 2)),
            models=(a_model("m", gib),),
            deployments=(a_deployment(engine=engine),),
        )
        return plan_deployments(cluster).unmet[0].reason

    assert "ams-1: needs 4 devices of one class, it has 2 x h100-80g" in reason(200.0)
    would = "2 x (2 x 79.65 GiB) would hold it: set devices to 4 and nodes to 2, in a PoP with"
    assert f"the largest node here has 2 x h100-80g; {would}" in reason(200.0)
    assert reason(100.0).endswith("the largest node here has 2 x h100-80g; set devices to 2")


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 1e300])
def test_invalid_demand_rates_move_nothing(rate: float) -> None:
    row = DemandRate(deployment_id=DeploymentId("d"), pop=PopId("sin"), requests_per_s=rate)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("sin-1", "sin")),
        placements=(a_placement("r1", "ams-1"),),
        demand=(row,),
    )
    assert not plan_deployments(cluster).starts


def test_explain_says_what_demand_would_pay() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("sin-1", "sin")),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("sin", 0.02),),
    )
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert "It would pay with more demand near sin" in explained.elsewhere[0].reason
