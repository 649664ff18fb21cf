"""Extreme cluster states, from bugs that were found with them."""

import math

import msgspec
import numpy as np
import pytest

from isochrone.wire.ids import DeploymentId
from isochrone.wire.models.model import EngineSettings
from scheduler.decide.arrays import NO_FLOATS
from scheduler.decide.cluster import ClusterState, NodeRefusal
from scheduler.decide.placement.fleet.latency_table import LatencyTable
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.placement.search.load_assignment import LoadAssignment
from scheduler.decide.whatif import explain_placement
from tests.builders import a_cluster, a_deployment, a_device, a_model, a_node, a_placement
from tests.unit.scheduler.test_plan import a_demand, after_plan, starts


def until_stable(cluster: ClusterState, plans_max: int = 12) -> ClusterState:
    """Return the cluster state once a plan moves nothing."""
    for _ in range(plans_max):
        plan = plan_deployments(cluster)
        if not plan.starts and not plan.endings:
            return cluster
        cluster = after_plan(cluster, plan)
    pytest.fail(f"still moving: {plan}")


def versions_by_node(cluster: ClusterState) -> list[tuple[int, str]]:
    return sorted((p.version, str(p.node_id)) for p in cluster.placements)


def test_an_old_version_in_a_better_slot_than_is_free_is_replaced_without_endless_starts() -> None:
    full = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=1.3), a_node("sin-1", "sin", gib=40.0)),
        deployments=(a_deployment(version=2, replicas_max=3),),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("ams", 3.0),),
    )
    assert versions_by_node(until_stable(full)) == [(2, "ams-1"), (2, "sin-1")]
    # Also where the policy allows one replica, and there are two during the change.
    one = msgspec.structs.replace(full, deployments=(a_deployment(version=2, replicas_max=1),))
    assert versions_by_node(until_stable(one)) == [(2, "sin-1")]


def test_with_replicas_max_zero_nothing_is_replaced() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"),),
        deployments=(a_deployment(version=2, replicas_min=0, replicas_max=0),),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("ams", 3.0),),
    )
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert [ending.replica_id for ending in plan.endings] == ["r1"]


def test_a_node_that_refused_a_deployment_still_gets_others() -> None:
    why = (NodeRefusal(DeploymentId("d"), "it knows no option x"),)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", refused=why),),
        deployments=(a_deployment("d"), a_deployment("e")),
    )
    plan = plan_deployments(cluster)
    assert starts(plan) == [("e", "ams-1")]
    assert "ams-1: it refused a replica of this deployment: it knows no option x" in (
        plan.unmet[0].reason
    )


def test_a_node_that_refused_one_version_of_a_deployment_gets_the_next() -> None:
    why = (NodeRefusal(DeploymentId("d"), "vllm is not on the PATH", version=1),)
    deployment = a_deployment("d")
    first, second = (msgspec.structs.replace(deployment, version=number) for number in (1, 2))
    nodes = (a_node("ams-1", "ams", refused=why),)
    assert not starts(plan_deployments(a_cluster(nodes=nodes, deployments=(first,))))
    plan = plan_deployments(a_cluster(nodes=nodes, deployments=(second,)))
    assert starts(plan) == [("d", "ams-1")]


@pytest.mark.parametrize("is_lacking", [True, False])
def test_a_replica_ends_for_another_only_on_a_node_that_has_its_engine(is_lacking: bool) -> None:
    """A deployment of vLLM took the slot of a mock engine, on a node that then refused it."""
    lacking = {"vllm": "vllm is not on the PATH of the agent"} if is_lacking else {}
    vllm = EngineSettings(driver="vllm", kv_memory_bytes=0)
    cluster = a_cluster(
        nodes=tuple(a_node(f"{p}-1", p, 4.0, lacking_engines=lacking) for p in ("ams", "fra")),
        models=(a_model(), a_model("other")),
        deployments=(a_deployment(replicas_max=2), a_deployment("e", "other", engine=vllm)),
        placements=(a_placement("r1", "ams-1"), a_placement("r2", "fra-1")),
        demand=(a_demand("ams", 1.0),),
    )
    plan = plan_deployments(cluster)
    assert [ending.replica_id for ending in plan.endings] == ([] if is_lacking else ["r1"])
    reasons = [requirement.reason for requirement in plan.unmet]
    assert any("ams-1: vllm is not on the PATH" in reason for reason in reasons) == is_lacking


def test_a_replica_starts_where_its_engine_is() -> None:
    lacking = a_node("ams-1", "ams", lacking_engines={"mock": "not installed"})
    able = a_node("ams-2", "ams")
    assert not starts(plan_deployments(a_cluster(nodes=(lacking,))))
    assert starts(plan_deployments(a_cluster(nodes=(lacking, able)))) == [("d", "ams-2")]


def test_a_model_without_weights_does_not_break_a_plan() -> None:
    gpu = msgspec.structs.replace(a_device(79.0, "gpu0"), device_class="h100-80g")
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=(gpu,)),),
        models=(a_model("m", 0.0), a_model("other", 1.0)),
        deployments=(a_deployment("d"), a_deployment("e", "other")),
    )
    assert starts(plan_deployments(cluster)) == [("d", "ams-1"), ("e", "ams-1")]


def test_rounding_errors_of_removed_capacity_do_not_break_an_assignment() -> None:
    latency = LatencyTable(np.zeros((0, 1)))
    assignment = LoadAssignment(NO_FLOATS, NO_FLOATS, latency, np.zeros(1), 5000.0)
    capacity = 0.7 * 2.020276102957687
    for _ in range(3):
        assignment.add_capacity(0, capacity)
    for _ in range(3):
        assignment.remove_capacity(0, capacity)
    assert assignment.cost() == 0


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, 5e-324])
def test_an_implausible_disk_rate_attracts_no_replica(rate: float) -> None:
    implausible = a_node("sin-1", "sin", disk_bytes_per_s=rate, fetch_bytes_per_s=rate)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), implausible, a_node("sin-2", "sin")),
        deployments=(a_deployment(replicas_max=9),),
        placements=(a_placement("r1", "ams-1"), a_placement("r2", "sin-2")),
        demand=(a_demand("ams", 0.5), a_demand("sin", 0.03)),
    )
    assert not plan_deployments(cluster).starts
    explanation = explain_placement(cluster, DeploymentId("d"))
    assert explanation is not None
    assert "warm in 6 s" in explanation.elsewhere[0].reason
