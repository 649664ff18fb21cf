"""A replica over several nodes of one PoP: one seat, started, counted, lost and ended as one."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.model import EngineSettings
from isochrone.wire.report import Device, ReplicaState
from scheduler.decide.cluster import ClusterState, FleetNode, PlacementPlan
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.fleet.slots import free_memory
from scheduler.decide.placement.multi_node import RankPorts, with_secret
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.placement.rollout_split import join_rollouts
from scheduler.decide.routing.route_table import build_route_table
from scheduler.decide.whatif.explain import explain_placement
from scheduler.decide.whatif.what_if import apply_plan
from tests.builders import (
    GIB,
    a_cluster,
    a_deployment,
    a_device,
    a_model,
    a_node,
    a_placement,
)

OVER_TWO = EngineSettings(driver="mock", kv_memory_bytes=0, devices=2, nodes=2)
PORTS = (9400, 9403)


def willing(name: str, pop: str = "ams", gib: float = 2.0, **fields: Any) -> FleetNode:
    return a_node(name, pop, gib, rank_ports=PORTS, **fields)


def cluster_of(*nodes: FleetNode, gib: float = 3.0, **fields: Any) -> ClusterState:
    """Return a fleet that is to hold one replica of `gib`, over two nodes."""
    engine = fields.pop("engine", OVER_TWO)
    return a_cluster(
        nodes=nodes,
        models=(a_model("m", gib),),
        deployments=(a_deployment(engine=engine, replicas_max=1),),
        **fields,
    )


THREE = (willing("ams-1"), willing("ams-2"), willing("ams-3"))


def lost(cluster: ClusterState, *names: str) -> ClusterState:
    # Among so many others that one silence is a loss and no cut.
    others = tuple(a_node(f"iad-{number}", "iad", 0.1) for number in range(4))
    known = {node.node_id for node in cluster.nodes}
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(
            msgspec.structs.replace(node, silent_s=100.0) if node.node_id in names else node
            for node in (*cluster.nodes, *(o for o in others if o.node_id not in known))
        ),
    )


def test_two_nodes_of_a_pop_hold_what_neither_would() -> None:
    decided = plan_deployments(cluster_of(*THREE, willing("sin-1", "sin")))
    (start,) = decided.starts
    assert [part.node_id for part in start.parts] == ["ams-1", "ams-2"]
    assert [part.spec.replica_id for part in start.parts] == ["d-7-1", "d-7-1.1"]
    assert [part.spec.memory_bytes for part in start.parts] == [int(1.75 * GIB)] * 2
    groups = [part.spec.group for part in start.parts]
    assert [group.place for group in groups if group] == [0, 1]
    assert {(g.leader_id, g.nodes, g.host, g.port) for g in groups if g} == {
        ("d-7-1", 2, "ams-1", 9403)
    }
    assert start.reason.endswith("over ams-1, ams-2")
    assert not decided.unmet


def test_what_is_seated_is_counted_on_each_node_and_the_plan_is_at_rest() -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))
    left = free_memory(cluster.nodes, cluster.placements)
    assert [left[NodeId(f"ams-{n}"), a_device().device_id] for n in (1, 2, 3)] == [
        GIB // 4,
        GIB // 4,
        2 * GIB,
    ]
    again = plan_deployments(cluster)
    assert not again.starts
    assert not again.endings


@pytest.mark.parametrize("gone", ["ams-1", "ams-2"])
def test_the_loss_of_any_node_is_the_loss_of_the_seat(gone: str) -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))
    after = plan_deployments(lost(cluster, gone))
    (ending,) = after.endings
    assert ending.reason == f"it needs all of its nodes: {gone} is lost or revoked"
    assert (ending.node_id, *ending.follower_ids) == ("ams-1", "ams-2")
    # What is left of its memory comes free with it, and another seat is found then.
    (start,) = plan_deployments(apply_plan(lost(cluster, gone), after)).starts
    assert {part.node_id for part in start.parts} == {"ams-1", "ams-2", "ams-3"} - {gone}


def test_a_draining_node_is_left_once_another_seat_is_warm() -> None:
    nodes = (*THREE, willing("ams-4"))
    cluster = apply_plan(cluster_of(*nodes), plan_deployments(cluster_of(*nodes)))
    draining = msgspec.structs.replace(
        cluster,
        nodes=tuple(
            msgspec.structs.replace(node, draining=node.node_id == "ams-2")
            for node in cluster.nodes
        ),
    )
    first = plan_deployments(draining)
    assert [part.node_id for part in first.starts[0].parts] == ["ams-3", "ams-4"]
    assert not first.endings
    second = plan_deployments(apply_plan(draining, first))
    assert [ending.reason for ending in second.endings] == [
        "node ams-2 is draining, others are warm"
    ]


def test_a_part_that_failed_ends_the_whole_and_the_next_seat_is_elsewhere() -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))
    (placement,) = cluster.placements
    (follower,) = placement.followers
    failed = msgspec.structs.replace(follower, state=ReplicaState.FAILED, state_reason="no memory")
    cluster = msgspec.structs.replace(
        cluster, placements=(msgspec.structs.replace(placement, followers=(failed,)),)
    )
    assert [e.reason for e in plan_deployments(cluster).endings] == [
        "it failed on ams-2: no memory"
    ]


def test_a_part_without_its_leader_or_a_leader_without_its_parts_is_ended() -> None:
    alone = a_placement("r.1", "ams-2", leader_id=ReplicaId("r"))
    headless = a_placement("s", "ams-1", rank_port=9400)
    decided = plan_deployments(cluster_of(*THREE, placements=(alone, headless)))
    assert {(e.replica_id, e.reason) for e in decided.endings} == {
        ("r.1", "its leader r is gone"),
        ("s", "the store knows 1 of 2 parts of it"),
    }


def test_nodes_that_do_not_allow_it_are_not_used_and_say_so() -> None:
    decided = plan_deployments(cluster_of(willing("ams-1"), a_node("ams-2", "ams", 2.0)))
    assert not decided.starts
    assert "ams-2: it has part in no replica over several nodes" in decided.unmet[0].reason
    assert "ams-1: it has room for one of 2 parts" in decided.unmet[0].reason


def test_parts_of_other_pops_or_classes_do_not_meet() -> None:
    other = msgspec.structs.replace(a_device(2.0), device_class="l4-24g")
    nodes = (willing("ams-1"), willing("sin-1", "sin"), willing("ams-2", devices=(other,)))
    decided = plan_deployments(cluster_of(*nodes))
    assert not decided.starts
    assert "with its like in ams there is room for 1" in decided.unmet[0].reason


def test_a_replica_too_large_for_a_node_is_told_what_would_hold_it() -> None:
    def gpus() -> tuple[Device, ...]:
        return tuple(
            msgspec.structs.replace(a_device(79.0, f"gpu{n}"), device_class="h100-80g")
            for n in range(8)
        )

    nodes = tuple(willing(f"ams-{n}", devices=gpus()) for n in (1, 2))
    on_one = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=8)
    reason = plan_deployments(cluster_of(*nodes, gib=1100.0, engine=on_one)).unmet[0].reason
    assert "2 x (8 x 79.65 GiB) would hold it: set devices to 16 and nodes to 2" in reason
    over_two = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=16, nodes=2)
    (start,) = plan_deployments(cluster_of(*nodes, gib=1100.0, engine=over_two)).starts
    assert [len(part.spec.device_ids) for part in start.parts] == [8, 8]
    over_much = plan_deployments(cluster_of(*nodes, gib=1400.0, engine=over_two)).unmet[0].reason
    assert "on 2 x (8 x 79.65 GiB): weights 1400.00 GiB / 16 = 87.50 GiB" in over_much


def test_devices_that_do_not_divide_by_nodes_are_a_contradiction() -> None:
    uneven = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=3, nodes=2)
    reasons = [row.reason for row in plan_deployments(cluster_of(*THREE, engine=uneven)).unmet]
    assert any("cannot spread 3 devices over 2 nodes" in reason for reason in reasons)


def test_each_replica_led_by_a_node_has_a_port_of_its_own() -> None:
    nodes = (willing("ams-1", gib=20.0), willing("ams-2", gib=20.0))
    cluster = cluster_of(*nodes)
    deployment = a_deployment(engine=OVER_TWO, replicas_min=6, replicas_max=6)
    cluster = msgspec.structs.replace(cluster, deployments=(deployment,))
    decided = plan_deployments(cluster)
    met = [(start.node_id, start.spec.group.port) for start in decided.starts if start.spec.group]
    assert len(met) == len(set(met)) == 6
    assert all(PORTS[0] <= port <= PORTS[1] for _, port in met)
    few = tuple(msgspec.structs.replace(node, rank_ports=(9400, 9400)) for node in nodes)
    assert len(plan_deployments(msgspec.structs.replace(cluster, nodes=few)).starts) == 2


def test_no_port_is_given_twice() -> None:
    ports = RankPorts(cluster_of(*THREE, placements=(a_placement("r", "ams-1", rank_port=9403),)))
    assert sorted(ports.take(THREE[0]) for _ in range(3)) == [9400, 9401, 9402]
    with pytest.raises(ValueError, match="all of its 4 rank ports are taken"):
        ports.take(THREE[0])


def test_routers_are_told_of_the_leader_alone_and_only_while_all_nodes_count() -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))

    def routed(cluster: ClusterState) -> list[str]:
        view = judge_liveness(cluster.nodes, cluster.acting_for_s)
        generation = cluster.generation
        table = build_route_table(cluster, view, (), generation=generation, epoch=1)  # type: ignore[arg-type]
        return [route.replica_id for route in table.routes]

    assert routed(cluster) == ["d-7-1"]
    assert routed(lost(cluster, "ams-2")) == []


def test_a_new_versions_parts_bear_its_name_and_one_secret() -> None:
    (start,) = plan_deployments(cluster_of(*THREE)).starts
    marked = msgspec.structs.replace(
        start, spec=msgspec.structs.replace(start.spec, deployment_id=DeploymentId("d~2"))
    )
    marked = msgspec.structs.replace(
        marked, spec=msgspec.structs.replace(marked.spec, replica_id=ReplicaId("d~2-7-1"))
    )
    (named,) = join_rollouts(PlacementPlan(based_on=start.spec.version, starts=(marked,))).starts  # type: ignore[arg-type]
    told = with_secret(named, "known to all").parts
    assert [part.spec.replica_id for part in told] == ["d-v2-7-1", "d-v2-7-1.1"]
    assert {part.spec.deployment_id for part in told} == {"d"}
    assert {
        (part.spec.group.leader_id, part.spec.group.secret) for part in told if part.spec.group
    } == {("d-v2-7-1", "known to all")}


def test_explain_names_every_node_of_it() -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert [(row.node_id, row.reason) for row in explained.here] == [
        ("ams-1", "at least 1 replica is asked for; over ams-1, ams-2"),
        ("ams-2", "part 1 of d-7-1"),
    ]
