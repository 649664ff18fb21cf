"""Replicas that share device memory by sleeping: how many are placed, and which never sleep."""

from typing import Any

import msgspec

from isochrone.wire.ids import DeploymentId, DeviceId, PopId
from isochrone.wire.models.model import Deployment, EngineSettings
from isochrone.wire.peers.report import NodeDevice
from scheduler.decide.cluster import ClusterState, DemandRate, Placement
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.whatif import explain_placement
from tests.builders import (
    GIB,
    a_cluster,
    a_deployment,
    a_device,
    a_model,
    a_node,
    a_placement,
)


def over_committed(count: int, *, awake_min: int = 0, keep_warm: tuple[str, ...] = ()) -> Any:
    """Plan `count` deployments of 1.25 GiB each, over-committed four times, on 4 GiB."""
    deployments = tuple(
        a_deployment(f"d{n:02}", overcommit=4.0, awake_min=awake_min, keep_warm=keep_warm)
        for n in range(count)
    )
    cluster = a_cluster(nodes=(a_node("n1", "ams", 4.0),), deployments=deployments, placements=())
    return plan_deployments(cluster, PlanLimits(starts_max=100))


def test_over_committed_replicas_share_a_device() -> None:
    plan = over_committed(13)
    assert len(plan.starts) == 12  # 4 GiB / (1.25 / 4)
    assert {start.spec.overcommit for start in plan.starts} == {4.0}
    assert {start.spec.memory_bytes for start in plan.starts} == {int(1.25 * GIB)}
    assert sum(start.spec.planned_bytes for start in plan.starts) <= 4 * GIB


def test_the_replicas_that_stay_awake_are_counted_in_full() -> None:
    for plan in (over_committed(13, awake_min=1), over_committed(13, keep_warm=("ams",))):
        assert len(plan.starts) == 3
        assert {start.spec.overcommit for start in plan.starts} == {1.0}


def test_an_engine_whose_sleep_frees_nothing_on_a_cpu_is_over_committed_on_gpus_only() -> None:
    engine = EngineSettings(driver="vllm", options={"enable_sleep_mode": "true"})
    deployments = (a_deployment("d", overcommit=4.0, engine=engine),)
    on_cpu = a_node("n1", "ams", 16.0)
    gpu = NodeDevice(
        device_id=DeviceId("cuda:0"), device_class="h100-80g", memory_bytes=80 * GIB, healthy=True
    )
    on_gpu = a_node("n2", "ams", devices=(gpu,))
    plan = plan_deployments(a_cluster(nodes=(on_cpu,), deployments=deployments, placements=()))
    assert not plan.starts
    assert "cannot over-commit vllm on a CPU" in plan.unmet[0].reason
    both = a_cluster(nodes=(on_cpu, on_gpu), deployments=deployments, placements=())
    assert {start.node_id for start in plan_deployments(both).starts} == {"n2"}


def test_a_fixed_replica_leaves_memory_for_a_sleeping_one_to_wake() -> None:
    sleeping = a_deployment("a", overcommit=4.0)
    fixed = [a_deployment(name) for name in "bcd"]
    cluster = a_cluster(
        nodes=(a_node("n1", "ams", 4.0),), deployments=(sleeping, *fixed), placements=()
    )
    plan = plan_deployments(cluster, PlanLimits(starts_max=100))
    # 3 x 1.25 GiB would leave 0.25 GiB, in which the sleeping replica could never wake.
    assert sorted(start.spec.deployment_id for start in plan.starts) == ["a", "b", "c"]


def sleeping_replica(device: str, awake_gib: float) -> Placement:
    """Return a warm replica of a deployment over-committed four times."""
    return a_placement(
        "asleep",
        "n1",
        "asleep",
        device_ids=(DeviceId(device),),
        memory_bytes=int(awake_gib * GIB / 4),
        overcommit=4.0,
    )


def beside_a_sleeping_replica(
    deployment: Deployment, devices: int, awake_gib: float = 3.25
) -> ClusterState:
    """Return a node with 4 GiB devices, on the first of which a replica sleeps."""
    node = a_node("n1", "ams", devices=tuple(a_device(4.0, f"gpu{n}") for n in range(devices)))
    asleep = a_deployment("asleep", "large", overcommit=4.0)
    return a_cluster(
        nodes=(node,),
        models=(a_model(), a_model("large", awake_gib - 0.25)),
        deployments=(asleep, deployment),
        placements=(sleeping_replica("gpu0", awake_gib),),
    )


def test_a_device_where_a_sleeping_replica_needs_the_memory_does_not_hide_an_empty_one() -> None:
    plan = plan_deployments(beside_a_sleeping_replica(a_deployment("d"), devices=2))
    assert [start.spec.device_ids for start in plan.starts] == [("gpu1",)]


def test_a_replica_that_grows_leaves_memory_for_a_sleeping_one_to_wake() -> None:
    growing = a_deployment("d", engine=EngineSettings(driver="vllm"))
    cluster = beside_a_sleeping_replica(growing, devices=1, awake_gib=0.5)
    sized = msgspec.structs.replace(
        cluster,
        nodes=(a_node("n1", "ams", devices=(a_device(40.0, "gpu0"),)),),
        placements=(sleeping_replica("gpu0", 8.0),),
    )
    (start,) = plan_deployments(sized).starts
    assert 8 * GIB < start.spec.memory_bytes <= 32 * GIB


def test_a_layout_of_several_replicas_leaves_memory_for_a_sleeping_one_to_wake() -> None:
    policies: dict[str, Any] = {"replicas_min": 3, "replicas_max": 3}
    cluster = beside_a_sleeping_replica(a_deployment("d", **policies), devices=3)
    other = a_deployment("e", **policies)
    cluster = msgspec.structs.replace(cluster, deployments=(*cluster.deployments, other))
    plan = plan_deployments(cluster)
    assert len(plan.starts) == 6
    assert all("gpu0" not in start.spec.device_ids for start in plan.starts)


def test_a_refusal_counts_what_sleeping_replicas_need_to_wake() -> None:
    cluster = beside_a_sleeping_replica(a_deployment("d"), devices=1)
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert "needs 1.25 GiB, the most free on one device is 0.75 GiB" in plan.unmet[0].reason
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert [row.feasible for row in explained.elsewhere] == [False]


def test_a_sleeping_replica_leaves_memory_that_it_keeps_from_one_that_is_required() -> None:
    needed = a_deployment("d", replicas_min=1)
    cluster = beside_a_sleeping_replica(needed, devices=1)
    other = a_deployment("asleep", "large", replicas_min=0, overcommit=4.0)
    demand = DemandRate(
        deployment_id=other.deployment_id, pop=PopId("ams"), requests_per_s=1.0,
        output_tokens_per_s=10.0,
    )  # fmt: skip
    plan = plan_deployments(
        msgspec.structs.replace(cluster, deployments=(other, needed), demand=(demand,))
    )
    assert [ending.replica_id for ending in plan.endings] == ["asleep"]
