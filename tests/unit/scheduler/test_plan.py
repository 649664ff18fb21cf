"""What the planner does, by rows, and what it never does, by properties."""

import math
from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, DeviceId, Generation, NodeId, PopId
from isochrone.wire.model import EngineSettings
from isochrone.wire.report import ReplicaState
from scheduler.decide.cluster import ClusterState, DemandRate, PlacementPlan, StartFailures
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.fleet.slots import free_memory, residency_allows
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.whatif.explain import explain_placement
from tests.builders import (
    GIB,
    PLACES,
    a_cluster,
    a_deployment,
    a_device,
    a_model,
    a_node,
    a_placement,
)

NODES = (a_node("ams-1", "ams"), a_node("iad-1", "iad"), a_node("sin-1", "sin"))


def a_demand(pop: str, requests_per_s: float, deployment: str = "d") -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId(deployment),
        pop=PopId(pop),
        requests_per_s=requests_per_s,
        uncached_tokens_per_s=requests_per_s * 20,
        output_tokens_per_s=requests_per_s * 2,
    )


def carried_out(cluster: ClusterState, decided: PlacementPlan, state: str = "warm") -> ClusterState:
    """Return the picture after a plan was carried out: what was loading has come up too."""
    ended = {ending.replica_id for ending in decided.endings}
    kept = tuple(
        msgspec.structs.replace(p, state=ReplicaState(state))
        if p.state is ReplicaState.LOADING
        else p
        for p in cluster.placements
        if p.replica_id not in ended
    )
    begun = tuple(start.placement(ReplicaState(state)) for start in decided.starts)
    return msgspec.structs.replace(
        cluster,
        placements=kept + begun,
        generation=Generation(cluster.generation + 1),
    )


def starts(decided: PlacementPlan) -> list[tuple[str, str]]:
    return [(start.spec.deployment_id, start.node_id) for start in decided.starts]


def test_a_new_deployment_gets_its_minimum() -> None:
    decided = plan_deployments(a_cluster(nodes=NODES, deployments=(a_deployment(replicas_min=2),)))
    assert len(decided.starts) == 2
    assert len({start.node_id for start in decided.starts}) == 2  # spread over PoPs
    assert all("at least 2" in start.reason for start in decided.starts)


def test_a_pop_kept_warm_gets_a_replica_there() -> None:
    decided = plan_deployments(
        a_cluster(nodes=NODES, deployments=(a_deployment(keep_warm=("sin",)),))
    )
    assert starts(decided) == [("d", "sin-1")]


def test_demand_far_away_brings_a_replica_there() -> None:
    cluster = a_cluster(
        nodes=NODES,
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("sin", 1.0),),
    )
    decided = plan_deployments(cluster)
    assert starts(decided) == [("d", "sin-1")]
    assert "demand: saves" in decided.starts[0].reason


def test_a_whisper_of_demand_moves_nothing() -> None:
    cluster = a_cluster(
        nodes=NODES, placements=(a_placement("r1", "ams-1"),), demand=(a_demand("sin", 0.01),)
    )
    assert plan_deployments(cluster) == PlacementPlan(based_on=cluster.generation)


def test_one_lost_node_is_replaced_and_nothing_of_it_is_ended() -> None:
    nodes = (a_node("ams-1", "ams", silent_s=45.0), *NODES[1:])
    decided = plan_deployments(a_cluster(nodes=nodes, placements=(a_placement("r1", "ams-1"),)))
    assert len(decided.starts) == 1
    assert decided.starts[0].node_id != "ams-1"
    assert not decided.endings


def test_mass_silence_moves_nothing_and_says_why() -> None:
    nodes = tuple(msgspec.structs.replace(node, silent_s=60.0) for node in NODES)
    decided = plan_deployments(a_cluster(nodes=nodes, placements=(a_placement("r1", "ams-1"),)))
    assert not decided.starts
    assert not decided.endings
    assert "3 of 3 nodes are silent" in decided.frozen


def test_a_draining_node_is_left_only_when_another_is_warm() -> None:
    nodes = (a_node("ams-1", "ams", draining=True), *NODES[1:])
    cluster = a_cluster(nodes=nodes, placements=(a_placement("r1", "ams-1"),))
    first = plan_deployments(cluster)
    assert len(first.starts) == 1
    assert not first.endings
    coming = carried_out(cluster, first, "loading")
    assert not plan_deployments(coming).endings
    second = plan_deployments(carried_out(cluster, first, "warm"))
    assert [ending.replica_id for ending in second.endings] == ["r1"]
    assert "draining" in second.endings[0].reason


def test_replicas_that_would_fail_together_part_when_there_is_a_node_again() -> None:
    # What a drain of ams-1 leaves behind when it is taken back: both on the only other node.
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("ams-2", "ams")),
        deployments=(a_deployment(replicas_min=2, replicas_max=2),),
        placements=(a_placement("r1", "ams-2"), a_placement("r2", "ams-2")),
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "ams-1")]
    assert not first.endings
    assert first.starts[0].reason == "the others would all fail with ams-2"
    parted = carried_out(cluster, first)
    second = plan_deployments(parted)
    assert [ending.node_id for ending in second.endings] == ["ams-2"]
    assert not second.starts
    third = plan_deployments(carried_out(parted, second))
    assert not third.starts
    assert not third.endings


def test_of_two_that_fail_together_one_goes_before_the_one_apart() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("ams-2", "ams")),
        placements=(
            a_placement("r1", "ams-2"),
            a_placement("r2", "ams-2"),
            a_placement("youngest", "ams-1", age_s=1000.0),
        ),
    )
    assert [ending.node_id for ending in plan_deployments(cluster).endings] == ["ams-2"]


def test_in_whatever_order_cities_ask_they_are_served_from_near() -> None:
    demand = tuple(a_demand(pop, 3.0 if pop == "sin" else 0.001) for pop in sorted(PLACES))
    cluster = a_cluster(
        nodes=tuple(a_node(f"{pop}-1", pop) for pop in sorted(PLACES)), demand=demand
    )
    there = starts(plan_deployments(cluster))
    assert ("d", "sin-1") in there
    assert starts(plan_deployments(msgspec.structs.replace(cluster, demand=demand[::-1]))) == there


def test_a_new_version_takes_the_place_of_the_old_when_it_is_warm() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(version=2),),
        placements=(a_placement("r1", "ams-1"),),
    )
    first = plan_deployments(cluster)
    assert len(first.starts) == 1
    assert not first.endings
    second = plan_deployments(carried_out(cluster, first))
    assert [ending.replica_id for ending in second.endings] == ["r1"]


def test_a_new_version_that_finds_no_room_beside_the_old_one_says_so() -> None:
    old = a_placement("r1", "n1", memory_bytes=6 * GIB, age_s=1000.0)
    full = a_cluster(
        nodes=(a_node("n1", "ams"),),
        models=(a_model(gib=5.0),),
        deployments=(a_deployment(version=2),),
        placements=(old,),
    )
    decided = plan_deployments(full)
    assert (decided.starts, decided.endings) == ((), ())
    (unmet,) = decided.unmet
    assert "version 2" in unmet.reason
    assert "the most free on one device is 2.00 GiB" in unmet.reason
    roomy = msgspec.structs.replace(full, nodes=(a_node("n1", "ams", gib=16.0),))
    assert plan_deployments(roomy).unmet == ()


def test_what_is_loading_anew_makes_no_old_one_spare() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(version=2, replicas_min=2),),
        placements=(
            a_placement("old", "ams-1"),
            a_placement("crashed", "iad-1", state="loading"),
            a_placement("new", "sin-1", version=2),
        ),
    )
    assert [ending.replica_id for ending in plan_deployments(cluster).endings] == ["crashed"]


def test_who_yields_its_place_takes_over_from_nobody_who_is_drained() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=4.0), a_node("ams-2", "ams", draining=True)),
        models=(a_model(), a_model("big", gib=3.0)),
        deployments=(
            a_deployment(replicas_min=0, priority=28),
            a_deployment("large", "big"),
        ),
        placements=(a_placement("r1", "ams-1"), a_placement("r2", "ams-2")),
        demand=(a_demand("ams", 1.0),),
    )
    assert [ending.replica_id for ending in plan_deployments(cluster).endings] == ["r1"]


def test_a_failed_replica_is_ended_and_tried_elsewhere() -> None:
    cluster = a_cluster(
        nodes=NODES, placements=(a_placement("r1", "ams-1", state="failed", state_reason="oom"),)
    )
    decided = plan_deployments(cluster)
    assert [ending.replica_id for ending in decided.endings] == ["r1"]
    assert "oom" in decided.endings[0].reason
    assert decided.starts[0].node_id != "ams-1"


def a_given_up(times: int, ago_s: float, version: int = 1) -> StartFailures:
    return StartFailures(
        deployment_id=DeploymentId("d"),
        version=version,
        times=times,
        ago_s=ago_s,
        node_ids=(NodeId("ams-1"),),
        reason="broke 6 times: no such option",
    )


@pytest.mark.parametrize(
    ("given_up", "is_held"),
    [
        (a_given_up(1, 1.0), True),
        (a_given_up(1, 3.0), False),
        (a_given_up(4, 15.0), True),  # each time it waits twice as long,
        (a_given_up(4, 17.0), False),
        (a_given_up(10**6, 49.0), True),
        (a_given_up(10**6, 51.0), False),  # but what was mended is tried within a minute
        (a_given_up(9, 0.0, version=7), False),  # and what was changed at once.
    ],
)
def test_what_breaks_wherever_it_starts_is_tried_less_and_less_often(
    given_up: StartFailures, is_held: bool
) -> None:
    cluster = a_cluster(nodes=NODES, given_up=(given_up,))
    decided = plan_deployments(cluster)
    assert bool(decided.starts) is not is_held
    said = " ".join(unmet.reason for unmet in decided.unmet)
    assert ("no such option; it is tried again" in said) is is_held
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert explained.unmet == tuple(unmet.reason for unmet in decided.unmet)
    assert any(row.feasible for row in explained.elsewhere) is not is_held


def test_of_nodes_those_are_tried_first_that_gave_nothing_up() -> None:
    plans = plan_deployments(a_cluster(nodes=NODES, given_up=(a_given_up(1, 100.0),)))
    assert plans.starts[0].node_id != "ams-1"
    only = plan_deployments(
        a_cluster(nodes=(a_node("ams-1", "ams"),), given_up=(a_given_up(1, 100.0),))
    )
    assert only.starts[0].node_id == "ams-1"
    explained = explain_placement(
        a_cluster(nodes=NODES, given_up=(a_given_up(1, 100.0),)), DeploymentId("d")
    )
    assert explained is not None
    assert [row.reason[:17] for row in explained.elsewhere if row.node_id == "ams-1"] == [
        "1 of it broke her"
    ]
    all_of_them = tuple(NodeId(name) for name in ("ams-1", "iad-1", "sin-1", "ams-1", "iad-1"))
    again = msgspec.structs.replace(a_given_up(5, 100.0), node_ids=all_of_them)
    assert plan_deployments(a_cluster(nodes=NODES, given_up=(again,))).starts[0].node_id == "sin-1"


def test_while_one_is_warm_another_that_broke_is_tried_elsewhere_at_once() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(replicas_min=2),),
        placements=(a_placement("r1", "sin-1"),),
        given_up=(a_given_up(5, 0.0),),
    )
    assert plan_deployments(cluster).starts


def test_what_cannot_be_placed_is_said_with_its_numbers_and_ends_nothing() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=2.0),),
        deployments=(a_deployment(replicas_min=2),),
        placements=(a_placement("r1", "ams-1"),),
    )
    decided = plan_deployments(cluster)
    assert not decided.starts
    assert not decided.endings
    assert "needs 1.25 GiB, the most free on one device is 0.75 GiB" in decided.unmet[0].reason


def test_residency_withdrawn_ends_at_once() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(deny=("NL",)),),
        placements=(a_placement("r1", "ams-1"),),
    )
    decided = plan_deployments(cluster)
    assert [ending.replica_id for ending in decided.endings] == ["r1"]
    assert all(start.node_id != "ams-1" for start in decided.starts)


def test_a_deleted_deployment_ends_whole() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(),
        deleted=(DeploymentId("d"),),
        placements=(a_placement("r1", "ams-1"), a_placement("r2", "sin-1")),
    )
    assert len(plan_deployments(cluster).endings) == 2


def test_surplus_goes_after_it_has_settled_and_never_below_the_minimum() -> None:
    both = (a_placement("r1", "ams-1"), a_placement("r2", "sin-1"))
    cluster = a_cluster(nodes=NODES, placements=both)
    decided = plan_deployments(cluster)
    assert len(decided.endings) == 1
    assert not plan_deployments(carried_out(cluster, decided)).endings
    young = tuple(msgspec.structs.replace(p, age_s=30.0) for p in both)
    assert not plan_deployments(msgspec.structs.replace(cluster, placements=young)).endings


def test_two_replicas_that_came_up_in_one_pop_are_spread_once_they_have_settled() -> None:
    there = (a_placement("r1", "ams-1"), a_placement("r2", "ams-1"))
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("sin-1", "sin")),
        deployments=(a_deployment(replicas_min=2, replicas_max=2),),
        placements=there,
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "sin-1")]
    assert first.starts[0].reason == "worth more here than in ams"
    assert not first.endings
    assert plan_deployments(carried_out(cluster, first, "loading")) == PlacementPlan(
        based_on=Generation(8)
    )
    second = plan_deployments(carried_out(cluster, first))
    assert len(second.endings) == 1
    assert second.endings[0].node_id == "ams-1"
    assert not second.starts
    spread = carried_out(carried_out(cluster, first), second)
    assert plan_deployments(spread) == PlacementPlan(based_on=spread.generation)
    young = tuple(msgspec.structs.replace(p, age_s=30.0) for p in there)
    assert not plan_deployments(msgspec.structs.replace(cluster, placements=young)).starts


def test_the_only_replica_allowed_follows_its_demand() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(replicas_max=1),),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("sin", 1.0),),
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "sin-1")]
    assert not first.endings
    moved = carried_out(cluster, first)
    assert [ending.replica_id for ending in plan_deployments(moved).endings] == ["r1"]
    # A little is not worth a start, nor is anything where residency or a PoP kept warm holds it.
    little = msgspec.structs.replace(cluster, demand=(a_demand("sin", 0.05),))
    assert plan_deployments(little) == PlacementPlan(based_on=cluster.generation)
    kept = a_deployment(replicas_max=1, keep_warm=("ams",))
    denied = a_deployment(replicas_max=1, deny=("sin",))
    for held in (kept, denied):
        assert not plan_deployments(msgspec.structs.replace(cluster, deployments=(held,))).starts


def test_a_pop_to_be_kept_warm_does_not_wait_until_others_have_settled() -> None:
    """As after a drain: all that may be seated is elsewhere, and has just begun."""
    young = tuple(
        msgspec.structs.replace(a_placement(name, node), age_s=30.0)
        for name, node in (("r1", "ams-1"), ("r2", "iad-1"))
    )
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(replicas_max=2, keep_warm=("sin",)),),
        placements=young,
        demand=(a_demand("ams", 0.2), a_demand("iad", 0.1)),
    )
    first = plan_deployments(cluster)
    assert [(start.node_id, start.reason) for start in first.starts] == [
        ("sin-1", "sin is kept warm")
    ]
    assert not first.endings
    moved = carried_out(cluster, first)
    second = plan_deployments(moved)
    assert [ending.replica_id for ending in second.endings] == ["r2"]
    assert plan_deployments(carried_out(moved, second)) == PlacementPlan(
        based_on=Generation(moved.generation + 1)
    )
    # Where it has no room, what is young stays where it is.
    full = msgspec.structs.replace(cluster, nodes=(*NODES[:2], a_node("sin-1", "sin", devices=())))
    assert not plan_deployments(full).starts


def test_an_idle_deployment_without_a_minimum_goes_to_zero_and_demand_wakes_it() -> None:
    idle = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(replicas_min=0),),
        placements=(a_placement("r1", "ams-1"),),
    )
    assert [ending.replica_id for ending in plan_deployments(idle).endings] == ["r1"]
    asked = msgspec.structs.replace(
        idle,
        placements=(),
        demand=(DemandRate(deployment_id=DeploymentId("d"), pop=PopId("sin"), refused_per_s=0.05),),
    )
    assert starts(plan_deployments(asked)) == [("d", "sin-1")]
    assert not plan_deployments(msgspec.structs.replace(asked, demand=())).starts


def test_a_draining_node_is_left_by_what_nobody_asks_for() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", draining=True),),
        deployments=(a_deployment(replicas_min=0),),
        placements=(a_placement("r1", "ams-1"),),
    )
    assert [ending.replica_id for ending in plan_deployments(cluster).endings] == ["r1"]
    wanted = msgspec.structs.replace(cluster, demand=(a_demand("ams", 1.0),))
    assert not plan_deployments(wanted).endings  # nowhere else to go: it goes on serving


def test_explain_names_who_holds_a_place_under_scarcity() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=2.6),),
        deployments=(
            a_deployment("a", replicas_min=2, priority=90),
            a_deployment("b", replicas_min=2, priority=10),
        ),
    )
    decided = plan_deployments(cluster)
    assert [start.spec.deployment_id for start in decided.starts] == ["a", "a"]
    told = explain_placement(carried_out(cluster, decided), DeploymentId("b"))
    assert told is not None
    assert [row.reason for row in told.elsewhere] == [
        "needs 1.25 GiB, the most free on one device is 0.10 GiB; on it: 2 of a (priority 90)"
    ]


def test_explain_says_why_here_and_why_not_there() -> None:
    cluster = a_cluster(
        nodes=(*NODES, a_node("gru-1", "gru", gib=0.5)),
        placements=(
            a_placement("r1", "ams-1", reason="ams is kept warm", state_reason="broke once: oom"),
        ),
        demand=(a_demand("sin", 0.02),),
    )
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    here = explained.here[0]
    assert (here.reason, here.state_reason) == ("ams is kept warm", "broke once: oom")
    reasons = {str(row.node_id): row.reason for row in explained.elsewhere}
    assert "needs 1.25 GiB" in reasons["gru-1"]
    assert "21 needed" in reasons["sin-1"]
    assert explained.cities[0].nearest_pop == "ams"
    assert explain_placement(cluster, DeploymentId("nobody")) is None


@pytest.mark.parametrize("least", [0, 1])
def test_the_only_warm_replica_yields_its_place_once_another_is_warm(least: int) -> None:
    nodes = (
        a_node("ams-1", "ams", devices=(a_device(4.0, "gpu0"), a_device(4.0, "gpu1"))),
        a_node("fra-1", "fra", gib=2.0),
    )
    cluster = a_cluster(
        nodes=nodes,
        models=(a_model(), a_model("big", gib=3.0)),
        deployments=(
            a_deployment(replicas_min=least, replicas_max=2, priority=28),
            a_deployment("large", "big", replicas_min=2, replicas_max=2),
        ),
        placements=(
            a_placement("r1", "ams-1", device_ids=(DeviceId("gpu0"),)),
            a_placement(
                "r2",
                "ams-1",
                deployment="large",
                device_ids=(DeviceId("gpu1"),),
                memory_bytes=int(3.25 * GIB),
            ),
        ),
        demand=(a_demand("fra", 1.0),),
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "fra-1")]
    assert not first.endings
    second = plan_deployments(carried_out(cluster, first))
    assert [ending.replica_id for ending in second.endings] == ["r1"]


@st.composite
def clusters(draw: st.DrawFn) -> ClusterState:
    pops = sorted(PLACES)
    nodes = tuple(
        a_node(
            f"n{index}",
            draw(st.sampled_from([*pops, "ams", "ams"])),
            rank_ports=draw(st.sampled_from([None, (9400, 9401), (9400, 9401)])),
            silent_s=draw(st.sampled_from([0.0, 0.0, 0.0, 8.0, 40.0])),
            draining=draw(st.sampled_from([False, False, False, True])),
            revoked=draw(st.sampled_from([False] * 9 + [True])),
            failure_domain=draw(st.sampled_from(["", "rack"])),
            refused=draw(st.sampled_from([(), (), ((DeploymentId("d0"), "no"),)])),
            disk_free_bytes=draw(st.sampled_from([0, 0, 10**9, 10**12])),
            disk_bytes_per_s=draw(st.sampled_from([0.0, 0.0, 1e9, -1.0, math.nan])),
            devices=tuple(
                msgspec.structs.replace(
                    a_device(draw(st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0])), f"gpu{d}"),
                    device_class=draw(st.sampled_from(["cpu", "cpu", "l4-24g"])),
                    healthy=draw(st.sampled_from([True] * 9 + [False])),
                )
                for d in range(draw(st.integers(0, 2)))
            ),
        )
        for index in range(draw(st.integers(0, 6)))
    )
    models = (a_model("m", 1.0), a_model("big", 3.0), a_model("empty", 0.0))
    engines = {
        count: EngineSettings(driver="mock", kv_memory_bytes=0, devices=count, nodes=count)
        for count in (1, 2)
    }
    deployments = []
    for index in range(draw(st.integers(0, 3))):
        least = draw(st.integers(0, 3))
        deployments.append(
            a_deployment(
                f"d{index}",
                draw(st.sampled_from(["m", "m", "big", "empty"])),
                version=draw(st.integers(1, 2)),
                replicas_min=least,
                replicas_max=draw(st.one_of(st.integers(least, 4), st.just(0))),
                keep_warm=tuple(draw(st.lists(st.sampled_from([*pops, "xyz"]), max_size=1))),
                deny=tuple(draw(st.lists(st.sampled_from(["NL", "sin"]), max_size=1))),
                priority=draw(st.integers(0, 100)),
                engine=engines[draw(st.sampled_from([1, 1, 2]))],
            )
        )
    empty = a_cluster(nodes=nodes, models=models, deployments=tuple(deployments))
    demand = tuple(
        a_demand(
            draw(st.sampled_from([*pops, "xyz"])),
            draw(st.one_of(st.floats(0.0, 5.0), st.sampled_from([-1.0, 1e300, math.nan]))),
            deployment.deployment_id,
        )
        for deployment in deployments
        for _ in range(draw(st.integers(0, 2)))
    )
    # Placements as an earlier plan would have made them, so that the picture is a possible one.
    earlier = plan_deployments(msgspec.structs.replace(empty, generation=Generation(1)))
    states = ["warm", "warm", "loading", "failed"]
    placed = carried_out(empty, earlier)
    placements = tuple(
        msgspec.structs.replace(
            p,
            state=ReplicaState(draw(st.sampled_from(states))),
            version=draw(st.integers(1, 2)),
            age_s=draw(st.sampled_from([1.0, 10_000.0])),
        )
        for p in placed.placements
    )
    return msgspec.structs.replace(
        empty, placements=placements, demand=demand, acting_for_s=draw(st.sampled_from([5, 1e4]))
    )


@settings(deadline=None, max_examples=150)
@given(cluster=clusters())
def test_no_device_holds_more_than_its_memory(cluster: ClusterState) -> None:
    after = carried_out(
        cluster, PlacementPlan(based_on=cluster.generation, starts=plan_deployments(cluster).starts)
    )
    assert all(left >= 0 for left in free_memory(after.nodes, after.placements).values())


@settings(deadline=None, max_examples=150)
@given(cluster=clusters())
def test_residency_liveness_and_bounds_hold_for_every_start(cluster: ClusterState) -> None:
    decided = plan_deployments(cluster)
    limits = PlanLimits()
    nodes = {node.node_id: node for node in cluster.nodes}
    pops = {pop.pop: pop for pop in cluster.pops}
    policies = {d.deployment_id: d.policy for d in cluster.deployments}
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    assert len(decided.starts) <= limits.starts_max
    assert len(decided.endings) <= limits.endings_max
    for start in decided.starts:
        assert len({part.node_id for part in start.parts}) == start.spec.engine.nodes
        assert len({nodes[part.node_id].pop for part in start.parts}) == 1
        for part in start.parts:
            node = nodes[part.node_id]
            assert residency_allows(policies[part.spec.deployment_id], pops[node.pop])
            assert not (node.draining or node.revoked)
            assert part.spec.deployment_id not in dict(node.refused)
            assert view.by_node[node.node_id].value == "ready"
            assert part.reason
    ids = [start.spec.replica_id for start in decided.starts]
    assert len(set(ids)) == len(ids)
    assert not {p.replica_id for p in cluster.placements} & set(ids)
    if decided.frozen:
        assert not decided.starts
        assert not decided.endings


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_the_same_picture_gives_the_same_plan(cluster: ClusterState) -> None:
    assert plan_deployments(cluster) == plan_deployments(cluster)


@settings(deadline=None, max_examples=100)
@given(cluster=clusters(), chance=st.randoms(use_true_random=False))
def test_in_whatever_order_a_picture_tells_it_it_is_planned_alike(
    cluster: ClusterState, chance: Random
) -> None:
    told = {
        name: tuple(chance.sample(rows, len(rows)))
        for name in ("pops", "nodes", "models", "deployments", "placements")
        for rows in [getattr(cluster, name)]
    }
    one, other = (
        plan_deployments(cluster),
        plan_deployments(msgspec.structs.replace(cluster, **told)),
    )
    assert one.starts == other.starts
    assert {(e.replica_id, e.reason) for e in one.endings} == {
        (e.replica_id, e.reason) for e in other.endings
    }


@settings(deadline=None, max_examples=50)
@given(cluster=clusters())
def test_what_explain_says_cannot_be_the_plan_does_not_do(cluster: ClusterState) -> None:
    for start in plan_deployments(cluster).starts:
        explained = explain_placement(cluster, start.spec.deployment_id)
        assert explained is not None
        assert any(start.spec.replica_id in move for move in explained.next_moves)
        refused = {row.node_id for row in explained.elsewhere if not row.feasible}
        assert refused.isdisjoint(part.node_id for part in start.parts)


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_plans_carried_out_come_to_rest(cluster: ClusterState) -> None:
    for _ in range(40):
        decided = plan_deployments(cluster)
        if not decided.starts and not decided.endings:
            return
        cluster = carried_out(cluster, decided)
    pytest.fail(f"still moving after 40 plans: {decided}")


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_the_minimum_is_met_where_it_can_be(cluster: ClusterState) -> None:
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    if view.frozen:
        return
    cluster = carried_out(cluster, PlacementPlan(based_on=cluster.generation))
    for _ in range(40):
        decided = plan_deployments(cluster)
        if not decided.starts and not decided.endings:
            break
        cluster = carried_out(cluster, decided)
    nodes = {node.node_id: node for node in cluster.nodes}
    standing = Counter(
        p.deployment_id
        for p in cluster.placements
        if all(
            not nodes[name].draining and view.by_node[name].value != "lost" for name in p.node_ids
        )
    )
    unmet = {row.deployment_id for row in plan_deployments(cluster).unmet}
    for deployment in cluster.deployments:
        if deployment.deployment_id not in unmet:
            assert standing[deployment.deployment_id] >= deployment.policy.replicas_min


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_the_last_warm_replica_is_not_ended_to_make_room(cluster: ClusterState) -> None:
    decided = plan_deployments(cluster)
    ended = {ending.replica_id for ending in decided.endings}
    nodes = {node.node_id: node for node in cluster.nodes}
    pops = {pop.pop: pop for pop in cluster.pops}
    for deployment in cluster.deployments:
        if deployment.policy.replicas_min == 0:
            continue
        warm = [
            p
            for p in cluster.placements
            if p.deployment_id == deployment.deployment_id
            and p.state is ReplicaState.WARM
            and residency_allows(deployment.policy, pops[nodes[p.node_id].pop])
        ]
        if warm:
            assert any(p.replica_id not in ended for p in warm)


def test_gibibytes_are_what_they_say() -> None:
    assert a_model(gib=2.0).weights_bytes == 2 * GIB
