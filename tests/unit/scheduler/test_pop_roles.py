"""Roles in each PoP: from the tokens that it serves, counted per role, in plans and what-ifs."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.models.model import EngineSettings, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaProfile, ReplicaState
from isochrone.wire.peers.routes import Pop
from scheduler.api.admin.deployments import pair_problem
from scheduler.decide.cluster import ClusterState, DemandRate, MeasuredProfile
from scheduler.decide.demand.demand_rates import demand_by_deployment, demand_load
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.whatif import explain_placement
from scheduler.decide.whatif.predict import FleetPrediction, predict_service
from scheduler.decide.whatif.simulation import ClusterSnapshot, LoseNode, apply_plan, what_if
from tests.builders import a_cluster, a_deployment, a_node, a_placement

RATES = ReplicaProfile(prefill_tokens_per_s=1000, decode_tokens_per_s=100)
PROFILES = (MeasuredProfile(model_id="m", device_class="cpu", profile=RATES),)


def tokens_in(pop: str, uncached: float, output: float, requests: float = 1.0) -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId("d"),
        pop=PopId(pop),
        requests_per_s=requests,
        uncached_tokens_per_s=uncached,
        output_tokens_per_s=output,
    )


READING_IN_AMS = (tokens_in("ams", 1500.0, 20.0), tokens_in("sin", 100.0, 150.0))


def two_pops() -> ClusterState:
    """Return four unified replicas in each of two far PoPs; most prompts come from one of them."""
    deployment = a_deployment(
        roles="auto", replicas_min=8, replicas_max=8, keep_warm=("ams", "sin")
    )
    nodes = tuple(a_node(f"{pop}-{n}", pop) for pop in ("ams", "sin") for n in range(4))
    placements = tuple(a_placement(f"r-{node.node_id}", node.node_id) for node in nodes)
    return a_cluster(
        nodes=nodes,
        deployments=(deployment,),
        placements=placements,
        demand=READING_IN_AMS,
        profiles=PROFILES,
    )


def settled(cluster: ClusterState) -> ClusterState:
    """Apply plans until one is empty."""
    for _ in range(40):
        plan = plan_deployments(cluster)
        if plan.is_empty:
            return cluster
        cluster = apply_plan(cluster, plan)
    raise AssertionError("the plans go on changing something")


def roles_in(cluster: ClusterState, pop: str) -> list[str]:
    return sorted(p.role.value for p in cluster.placements if p.node_id.startswith(pop))


@pytest.mark.parametrize("driver", ["sglang", "tensorrt_llm"])
def test_an_engine_that_keeps_its_role_is_started_for_it(driver: str) -> None:
    engine = EngineSettings(driver=driver, kv_memory_bytes=1 << 20)
    deployment = a_deployment(
        roles="prefill=1,decode=2", replicas_min=3, replicas_max=3, engine=engine
    )
    nodes = tuple(a_node(f"ams-{n}", "ams") for n in range(3))
    cluster = settled(a_cluster(nodes=nodes, deployments=(deployment,), profiles=PROFILES))
    assert roles_in(cluster, "ams") == ["decode", "decode", "prefill"]
    other = msgspec.structs.replace(
        deployment,
        policy=msgspec.structs.replace(deployment.policy, roles="prefill=2,decode=1"),
    )
    after = settled(msgspec.structs.replace(cluster, deployments=(other,)))
    assert after.placements == cluster.placements, "a running one keeps its role"


def test_an_engine_that_needs_both_roles_has_them_in_one_pop() -> None:
    pops = [
        Pop(pop=PopId(name), city=name, latitude=0, longitude=0, country=country)
        for name, country in (("ams", "NL"), ("sin", "SG"))
    ]
    sglang = EngineSettings(driver="sglang")
    one = PlacementPolicy(roles="prefill=1,decode=2", allow=("ams",), replicas_min=2)
    assert pair_problem(sglang, one, pops) == ""
    for fields in ({"allow": ()}, {"replicas_min": 1}):
        policy = msgspec.structs.replace(one, **fields)
        assert pair_problem(sglang, policy, pops).startswith("roles of sglang need both in each")
        assert pair_problem(EngineSettings(driver="vllm"), policy, pops) == ""


def test_each_pop_has_the_roles_of_the_demand_that_it_serves() -> None:
    cluster = settled(two_pops())
    # Amsterdam reads for 88 % of its time, Singapore for 6 %; together they would for 48 %.
    assert roles_in(cluster, "ams") == ["prefill", "prefill", "prefill", "unified"]
    assert roles_in(cluster, "sin") == ["unified"] * 4
    evening = (tokens_in("ams", 100.0, 150.0), tokens_in("sin", 1500.0, 20.0))
    turned = settled(msgspec.structs.replace(cluster, demand=evening))
    assert roles_in(turned, "ams") == ["unified"] * 4
    assert roles_in(turned, "sin").count("prefill") == 3


def test_a_pop_changes_roles_while_others_start_and_lose_replicas() -> None:
    cluster = two_pops()
    other = a_deployment("other", replicas_min=1)
    busy = msgspec.structs.replace(cluster, deployments=(*cluster.deployments, other))
    plan = plan_deployments(busy)
    assert [start.spec.deployment_id for start in plan.starts] == ["other"]
    assert [change.role for change in plan.role_changes] == [Role.PREFILL]
    # A replica of the same PoP is loading: no role changes there.
    loading = msgspec.structs.replace(cluster.placements[0], state=ReplicaState.LOADING)
    starting = msgspec.structs.replace(cluster, placements=(loading, *cluster.placements[1:]))
    assert not plan_deployments(starting).role_changes
    # One of another PoP is: they do.
    loading = msgspec.structs.replace(cluster.placements[-1], state=ReplicaState.LOADING)
    starting = msgspec.structs.replace(cluster, placements=(*cluster.placements[:-1], loading))
    assert len(plan_deployments(starting).role_changes) == 1


def split_pop(**fields: Any) -> ClusterState:
    """Return a PoP with one prefill replica and two that generate, at a fixed ratio."""
    deployment = a_deployment(
        roles="prefill=1,decode=2", replicas_min=3, replicas_max=4, keep_warm=("ams",), **fields
    )
    nodes = tuple(a_node(f"ams-{n}", "ams", gib=1.6) for n in range(4))
    roles = (Role.UNIFIED, Role.PREFILL, Role.DECODE)
    return a_cluster(
        nodes=nodes,
        deployments=(deployment,),
        placements=tuple(
            a_placement(f"r{n}", f"ams-{n}", role=role) for n, role in enumerate(roles)
        ),
        demand=(tokens_in("ams", 500.0, 50.0),),
        profiles=PROFILES,
    )


@pytest.mark.parametrize(("lost", "role"), [(1, Role.PREFILL), (2, Role.DECODE)])
def test_a_replica_on_a_lost_node_is_replaced_in_its_role(lost: int, role: Role) -> None:
    cluster = split_pop()
    gone = what_if(
        ClusterSnapshot(cluster=cluster), [LoseNode(node_id=cluster.nodes[lost].node_id)]
    )
    assert [(move.kind, move.role) for move in gone.moves] == [("start", role)]
    assert gone.is_at_rest


@pytest.mark.parametrize(("drained", "role"), [(1, Role.PREFILL), (2, Role.DECODE)])
def test_a_drained_replica_is_replaced_in_its_role_before_it_ends(drained: int, role: Role) -> None:
    cluster = split_pop()
    nodes = list(cluster.nodes)
    nodes[drained] = msgspec.structs.replace(nodes[drained], draining=True)
    draining = msgspec.structs.replace(cluster, nodes=tuple(nodes))
    plan = plan_deployments(draining)
    assert ([start.spec.role for start in plan.starts], plan.endings) == ([role], ())
    after = settled(draining)
    assert roles_in(after, "ams") == ["decode", "prefill", "unified"]
    assert all(placement.node_id != nodes[drained].node_id for placement in after.placements)


def test_without_a_place_for_the_last_generating_replica_the_others_take_its_role() -> None:
    cluster = split_pop()
    lonely = msgspec.structs.replace(
        cluster, nodes=cluster.nodes[1:2], placements=cluster.placements[1:2]
    )
    assert roles_in(settled(lonely), "ams") == ["unified"]


def test_a_new_version_begins_with_a_replica_that_generates() -> None:
    # No KV is sent from one version to another, so the old version's replicas do not count.
    cluster = split_pop(version=2)
    plan = plan_deployments(cluster)
    assert [start.spec.role for start in plan.starts] == [Role.UNIFIED]
    after = settled(cluster)
    assert roles_in(after, "ams") == ["decode", "prefill", "unified"]
    assert {placement.version for placement in after.placements} == {2}


def test_auto_keeps_replicas_unified_whose_steps_are_short_and_says_so() -> None:
    cluster = two_pops()
    (deployment,) = cluster.deployments
    engine = EngineSettings(driver="mock", kv_memory_bytes=0, options={"interval_ms": "25"})
    short = msgspec.structs.replace(deployment, engine=engine)
    assert "prefill" in roles_in(settled(cluster), "ams")
    cluster = msgspec.structs.replace(cluster, deployments=(short,))
    assert roles_in(settled(cluster), "ams") == ["unified"] * 4
    explanation = explain_placement(cluster, DeploymentId("d"))
    assert explanation is not None
    assert "0 of 4 replicas prefill (0 should)" in explanation.roles[0]
    assert explanation.roles[0].endswith("are short, so that roles would save no pauses")


def test_explain_says_what_each_role_has_to_do_and_can_do() -> None:
    explanation = explain_placement(split_pop(), DeploymentId("d"))
    assert explanation is not None
    assert explanation.roles == (
        "ams: 1 of 3 replicas prefill (1 should): demand 500 uncached prompt tokens/s, of 1000 that"
        " they can read; 2 generate: demand 50 output tokens/s, of 200 that they can generate",
    )
    assert [row.role.value for row in explanation.here] == ["unified", "prefill", "decode"]
    cluster = split_pop()
    lonely = msgspec.structs.replace(cluster, placements=cluster.placements[:1])
    one = explain_placement(lonely, DeploymentId("d"))
    assert one is not None
    assert one.roles[0].startswith("ams: 0 of 1 replicas prefill (0 should)")
    assert "uncached prompt tokens/s, read where the answers are generated; 1" in one.roles[0]
    assert one.roles[0].endswith("; the only replica of a PoP does both")
    unified = explain_placement(two_pops(), DeploymentId("d"))
    assert unified is not None
    changes = [move for move in unified.next_moves if "prefill" in move]
    assert changes == ["change r-ams-0 on ams-0 to prefill: 3 of 4 replicas should prefill, 0 do"]


def test_a_what_if_shows_changes_of_roles() -> None:
    answer = what_if(ClusterSnapshot(cluster=two_pops()), [])
    assert {(move.kind, move.pop, move.role) for move in answer.moves} == {
        ("role", "ams", Role.PREFILL)
    }
    assert answer.is_at_rest


def test_a_fixed_ratio_needs_replicas_for_the_role_that_is_short() -> None:
    rates = {"cpu": RATES}
    index = {PopId("ams"): 0, PopId("sin"): 1}
    demand = demand_by_deployment(READING_IN_AMS, index)[DeploymentId("d")]
    assert demand_load(demand, rates).replicas == pytest.approx([1.7, 1.6])
    # A third of the replicas generate: 1.5 replicas of output take 4.5, but reading needs no more.
    assert demand_load(demand, rates, 1 / 3).replicas == pytest.approx([1.7, 4.5])


def test_a_ratio_that_the_demand_does_not_have_takes_more_replicas() -> None:
    def planned(roles: str) -> int:
        deployment = a_deployment(roles=roles, replicas_max=12)
        nodes = tuple(a_node(f"ams-{n}", "ams", gib=1.6) for n in range(12))
        demand = (tokens_in("ams", 200.0, 280.0, requests=20.0),)
        cluster = a_cluster(
            nodes=nodes, deployments=(deployment,), demand=demand, profiles=PROFILES
        )
        return len(settled(cluster).placements)

    assert planned("unified") == 5
    assert planned("prefill=1,decode=1") == 8
    assert planned("prefill=1,decode=9") == 5


def served(output: float, *roles: Role) -> FleetPrediction:
    cluster = split_pop()
    placements = tuple(a_placement(f"r{n}", f"ams-{n}", role=role) for n, role in enumerate(roles))
    demand = (tokens_in("ams", 500.0, output),)
    return predict_service(msgspec.structs.replace(cluster, placements=placements, demand=demand))


def test_a_prediction_counts_prefill_replicas_only_as_far_as_there_is_something_to_read() -> None:
    split = served(180.0, Role.UNIFIED, Role.PREFILL, Role.DECODE)
    alike = served(180.0, Role.UNIFIED, Role.UNIFIED, Role.UNIFIED)
    assert split.cities[0].unserved_per_s == alike.cities[0].unserved_per_s == 0
    # More output than two replicas can generate: the prefill replica cannot help.
    short = served(240.0, Role.UNIFIED, Role.PREFILL, Role.DECODE)
    assert short.cities[0].unserved_per_s == pytest.approx(1 - 0.95 * 200 / 240, abs=1e-3)
    assert served(240.0, Role.UNIFIED, Role.UNIFIED, Role.UNIFIED).cities[0].unserved_per_s < (
        short.cities[0].unserved_per_s
    )
    # Alone, prefill replicas take requests.
    assert served(50.0, Role.PREFILL).cities[0].unserved_per_s < 1
