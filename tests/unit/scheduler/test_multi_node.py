"""A replica over several nodes of one PoP is started, counted, lost and ended as one."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.report import NodeDevice, ReplicaState
from scheduler.decide.cluster import ClusterState, FleetNode, PlacementPlan
from scheduler.decide.membership import judge_liveness
from scheduler.decide.placement.fleet.slots import free_memory
from scheduler.decide.placement.multi_node import RankPorts, with_secret
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.placement.rollout_split import join_rollouts
from scheduler.decide.routing import build_route_table
from scheduler.decide.whatif import explain_placement
from scheduler.decide.whatif.simulation import apply_plan
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


def a_rank_node(name: str, pop: str = "ams", gib: float = 2.0, **fields: Any) -> FleetNode:
    return a_node(name, pop, gib, rank_ports=PORTS, **fields)


def cluster_of(*nodes: FleetNode, gib: float = 3.0, **fields: Any) -> ClusterState:
    """Return a fleet with a deployment of one replica of `gib` over two nodes."""
    engine = fields.pop("engine", OVER_TWO)
    return a_cluster(
        nodes=nodes,
        models=(a_model("m", gib),),
        deployments=(a_deployment(engine=engine, replicas_max=1),),
        **fields,
    )


THREE = (a_rank_node("ams-1"), a_rank_node("ams-2"), a_rank_node("ams-3"))


def lost(cluster: ClusterState, *names: str) -> ClusterState:
    # With enough other nodes that one silent node counts as lost, not as a network cut.
    others = tuple(a_node(f"iad-{number}", "iad", 0.1) for number in range(4))
    known = {node.node_id for node in cluster.nodes}
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(
            msgspec.structs.replace(node, silent_s=100.0) if node.node_id in names else node
            for node in (*cluster.nodes, *(o for o in others if o.node_id not in known))
        ),
    )


def test_two_nodes_of_a_pop_hold_a_replica_that_fits_on_neither() -> None:
    plan = plan_deployments(cluster_of(*THREE, a_rank_node("sin-1", "sin")))
    (start,) = plan.starts
    assert [part.node_id for part in start.parts] == ["ams-1", "ams-2"]
    assert [part.spec.replica_id for part in start.parts] == ["d-7-1", "d-7-1.1"]
    assert [part.spec.memory_bytes for part in start.parts] == [int(1.75 * GIB)] * 2
    groups = [part.spec.group for part in start.parts]
    assert [group.place for group in groups if group] == [0, 1]
    assert {(g.leader_id, g.nodes, g.host, g.port) for g in groups if g} == {
        ("d-7-1", 2, "ams-1", 9403)
    }
    assert start.reason.endswith("over ams-1, ams-2")
    assert not plan.unmet


def test_a_multi_node_replica_takes_memory_on_each_node_and_the_plan_is_stable() -> None:
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
def test_the_loss_of_any_node_ends_the_replica(gone: str) -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))
    after = plan_deployments(lost(cluster, gone))
    (ending,) = after.endings
    assert ending.reason == f"it needs all of its nodes: {gone} is lost or revoked"
    assert (ending.node_id, *ending.follower_ids) == ("ams-1", "ams-2")
    # The memory of its other part becomes free, and another replica can start.
    (start,) = plan_deployments(apply_plan(lost(cluster, gone), after)).starts
    assert {part.node_id for part in start.parts} == {"ams-1", "ams-2", "ams-3"} - {gone}


def test_a_draining_node_of_a_group_is_left_once_another_replica_is_warm() -> None:
    nodes = (*THREE, a_rank_node("ams-4"))
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


def test_a_failed_part_ends_the_replica_and_the_next_one_starts_elsewhere() -> None:
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
    plan = plan_deployments(cluster_of(*THREE, placements=(alone, headless)))
    assert {(e.replica_id, e.reason) for e in plan.endings} == {
        ("r.1", "its leader r is gone"),
        ("s", "the store knows only 1 of 2 parts of it"),
    }


def test_nodes_without_rank_ports_are_not_used_and_say_so() -> None:
    plan = plan_deployments(cluster_of(a_rank_node("ams-1"), a_node("ams-2", "ams", 2.0)))
    assert not plan.starts
    assert "ams-2: it takes no part of a replica over several nodes" in plan.unmet[0].reason
    assert "ams-1: it has space for one of 2 parts" in plan.unmet[0].reason


def test_a_replica_spans_only_one_pop_and_one_device_class() -> None:
    other = msgspec.structs.replace(a_device(2.0), device_class="l4-24g")
    nodes = (
        a_rank_node("ams-1"),
        a_rank_node("sin-1", "sin"),
        a_rank_node("ams-2", devices=(other,)),
    )
    plan = plan_deployments(cluster_of(*nodes))
    assert not plan.starts
    assert "together with nodes like it in ams there is space for 1" in plan.unmet[0].reason


def test_a_replica_too_large_for_a_node_is_refused_with_settings_that_fit() -> None:
    def gpus() -> tuple[NodeDevice, ...]:
        return tuple(
            msgspec.structs.replace(a_device(79.0, f"gpu{n}"), device_class="h100-80g")
            for n in range(8)
        )

    nodes = tuple(a_rank_node(f"ams-{n}", devices=gpus()) for n in (1, 2))
    on_one = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=8)
    reason = plan_deployments(cluster_of(*nodes, gib=1100.0, engine=on_one)).unmet[0].reason
    assert "2 x (8 x 79.65 GiB) would hold it: set devices to 16 and nodes to 2" in reason
    over_two = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=16, nodes=2)
    (start,) = plan_deployments(cluster_of(*nodes, gib=1100.0, engine=over_two)).starts
    assert [len(part.spec.device_ids) for part in start.parts] == [8, 8]
    too_large = plan_deployments(cluster_of(*nodes, gib=1400.0, engine=over_two)).unmet[0].reason
    assert "on 2 x (8 x 79.65 GiB): weights 1400.00 GiB / 16 = 87.50 GiB" in too_large


def test_devices_that_do_not_divide_by_nodes_are_refused() -> None:
    uneven = EngineSettings(driver="vllm", kv_memory_bytes=0, devices=3, nodes=2)
    reasons = [row.reason for row in plan_deployments(cluster_of(*THREE, engine=uneven)).unmet]
    assert any("cannot spread 3 devices over 2 nodes" in reason for reason in reasons)


def test_each_replica_led_by_a_node_has_its_own_port() -> None:
    nodes = (a_rank_node("ams-1", gib=20.0), a_rank_node("ams-2", gib=20.0))
    cluster = cluster_of(*nodes)
    deployment = a_deployment(engine=OVER_TWO, replicas_min=6, replicas_max=6)
    cluster = msgspec.structs.replace(cluster, deployments=(deployment,))
    plan = plan_deployments(cluster)
    ports_by_node = [
        (start.node_id, start.spec.group.port) for start in plan.starts if start.spec.group
    ]
    assert len(ports_by_node) == len(set(ports_by_node)) == 6
    assert all(PORTS[0] <= port <= PORTS[1] for _, port in ports_by_node)
    one_port = tuple(msgspec.structs.replace(node, rank_ports=(9400, 9400)) for node in nodes)
    assert len(plan_deployments(msgspec.structs.replace(cluster, nodes=one_port)).starts) == 2


def test_no_rank_port_is_handed_out_twice() -> None:
    ports = RankPorts(cluster_of(*THREE, placements=(a_placement("r", "ams-1", rank_port=9403),)))
    assert sorted(ports.take(THREE[0]) for _ in range(3)) == [9400, 9401, 9402]
    with pytest.raises(ValueError, match="all of its 4 rank ports are taken"):
        ports.take(THREE[0])


def test_routers_get_a_route_to_the_leader_only_while_all_nodes_are_alive() -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))

    def routed(cluster: ClusterState) -> list[str]:
        view = judge_liveness(cluster.nodes, cluster.acting_for_s)
        generation = cluster.generation
        table = build_route_table(cluster, view, (), generation=generation, epoch=1)  # type: ignore[arg-type]
        return [route.replica_id for route in table.routes]

    assert routed(cluster) == ["d-7-1"]
    assert routed(lost(cluster, "ams-2")) == []


def test_the_parts_of_a_new_version_share_its_name_and_one_secret() -> None:
    (start,) = plan_deployments(cluster_of(*THREE)).starts
    marked = msgspec.structs.replace(
        start, spec=msgspec.structs.replace(start.spec, deployment_id=DeploymentId("d~2"))
    )
    marked = msgspec.structs.replace(
        marked, spec=msgspec.structs.replace(marked.spec, replica_id=ReplicaId("d~2-7-1"))
    )
    (named,) = join_rollouts(PlacementPlan(based_on=start.spec.version, starts=(marked,))).starts  # type: ignore[arg-type]
    parts = with_secret(named, "known to all").parts
    assert [part.spec.replica_id for part in parts] == ["d-v2-7-1", "d-v2-7-1.1"]
    assert {part.spec.deployment_id for part in parts} == {"d"}
    assert {
        (part.spec.group.leader_id, part.spec.group.secret) for part in parts if part.spec.group
    } == {("d-v2-7-1", "known to all")}


def test_explain_names_every_node_of_a_replica() -> None:
    cluster = apply_plan(cluster_of(*THREE), plan_deployments(cluster_of(*THREE)))
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert [(row.node_id, row.reason) for row in explained.here] == [
        ("ams-1", "at least 1 replica is required; over ams-1, ams-2"),
        ("ams-2", "part 1 of d-7-1"),
    ]
