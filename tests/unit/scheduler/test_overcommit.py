"""Replicas that share device memory by sleeping: how many are placed, and which never sleep."""

from typing import Any

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.report import NodeDevice
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from tests.builders import GIB, a_cluster, a_deployment, a_node


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
