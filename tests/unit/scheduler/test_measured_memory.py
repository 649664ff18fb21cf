"""The memory model of engines, and its correction by what agents measure."""

import msgspec
import pytest

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.report import NodeDevice, ReplicaProfile
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.capacity.measured_memory import measured_excess
from scheduler.decide.capacity.replica_capacity import overhead_bytes
from scheduler.decide.cluster import PlacementPlan
from scheduler.decide.placement.planner import plan_deployments
from tests.builders import a_cluster, a_deployment, a_model, a_node, a_placement

VLLM = EngineSettings(driver="vllm", kv_memory_bytes=GIB)
DEPLOYMENT = a_deployment("d", engine=VLLM, replicas_min=2)
PLANNED = int(3.5 * GIB)  # 1 of weights, 1 of KV, 0.75 of the engine and 0.75 of its graphs


def running(used_gib: float, *, extra_bytes: int = 0, node: str = "n1") -> PlacementPlan:
    """Plan a second replica beside one that uses `used_gib`."""
    profile = ReplicaProfile(used_bytes=int(used_gib * GIB))
    gpu = NodeDevice(
        device_id=DeviceId("gpu0"), device_class="h100-80g", memory_bytes=int(5.5 * GIB)
    )
    placement = a_placement(
        "r1",
        node,
        device_ids=(DeviceId("gpu0"),),
        memory_bytes=PLANNED + extra_bytes,
        profile=profile,
        extra_bytes=extra_bytes,
    )
    nodes = tuple(a_node(name, "ams", devices=(gpu,)) for name in ("n1", "n2"))
    return plan_deployments(
        a_cluster(nodes=nodes, deployments=(DEPLOYMENT,), placements=(placement,))
    )


@pytest.mark.parametrize(
    ("driver", "options", "mib"),
    [
        ("mock", {}, 256),
        ("embedded", {}, 256),
        ("vllm", {}, 1536),
        ("vllm", {"enforce_eager": "true"}, 768),
        ("sglang", {"disable_cuda_graph": ""}, 768),
    ],
)
def test_an_engine_takes_memory_of_its_own(driver: str, options: dict[str, str], mib: int) -> None:
    engine = EngineSettings(driver=driver, options=options)
    assert overhead_bytes(a_model(), engine) == mib * 1024**2
    more = msgspec.structs.replace(a_model(), extra_bytes=GIB)
    assert overhead_bytes(more, engine) == mib * 1024**2 + GIB


def test_a_replica_that_uses_its_plan_corrects_nothing() -> None:
    for used in (0.0, 2.0, 3.5, 3.55):
        (start,) = running(used).starts
        assert start.spec.memory_bytes == PLANNED
        assert start.spec.extra_bytes == 0


def test_what_a_replica_uses_beyond_its_plan_is_planned_for_the_next() -> None:
    (start,) = running(4.5).starts
    assert start.spec.memory_bytes == PLANNED + GIB
    assert start.spec.extra_bytes == GIB
    # The corrected replica is not corrected a second time.
    (start,) = running(4.5, extra_bytes=GIB).starts
    assert start.spec.memory_bytes == PLANNED + GIB


def test_the_correction_has_a_bound() -> None:
    (start,) = running(50.0).starts
    assert start.spec.extra_bytes == 2 * GIB


def test_another_engine_or_version_is_not_corrected() -> None:
    cluster = a_cluster(
        deployments=(DEPLOYMENT,),
        placements=(
            a_placement("r1", "n1", version=0, profile=ReplicaProfile(used_bytes=50 * GIB)),
        ),
    )
    by_id = {DEPLOYMENT.deployment_id: DEPLOYMENT}
    assert not measured_excess(cluster.placements, by_id)
