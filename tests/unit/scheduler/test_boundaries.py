"""Pictures at the edge of what can be, and the faults that were found there."""

import math

import msgspec
import numpy as np
import pytest

from isochrone.wire.ids import DeploymentId
from scheduler.decide.cluster import ClusterState
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.placement.search.load_assignment import NO_FLOATS, LoadAssignment
from scheduler.decide.whatif.explain import explain_placement
from tests.builders import a_cluster, a_deployment, a_device, a_model, a_node, a_placement
from tests.unit.scheduler.test_plan import a_demand, carried_out, starts


def at_rest(cluster: ClusterState, plans_max: int = 12) -> ClusterState:
    """Return the picture once nothing moves any more."""
    for _ in range(plans_max):
        decided = plan_deployments(cluster)
        if not decided.starts and not decided.endings:
            return cluster
        cluster = carried_out(cluster, decided)
    pytest.fail(f"still moving: {decided}")


def seats(cluster: ClusterState) -> list[tuple[int, str]]:
    return sorted((p.version, str(p.node_id)) for p in cluster.placements)


def test_an_old_version_in_a_better_place_than_is_free_starts_no_new_one_for_ever() -> None:
    full = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=1.3), a_node("sin-1", "sin", gib=40.0)),
        deployments=(a_deployment(version=2, replicas_max=3),),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("ams", 3.0),),
    )
    assert seats(at_rest(full)) == [(2, "ams-1"), (2, "sin-1")]
    # Nor where the policy allows one, which for a while are two.
    one = msgspec.structs.replace(full, deployments=(a_deployment(version=2, replicas_max=1),))
    assert seats(at_rest(one)) == [(2, "sin-1")]


def test_what_may_have_no_replica_is_not_replaced() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"),),
        deployments=(a_deployment(version=2, replicas_min=0, replicas_max=0),),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("ams", 3.0),),
    )
    decided = plan_deployments(cluster)
    assert not decided.starts
    assert [ending.replica_id for ending in decided.endings] == ["r1"]


def test_a_node_that_refused_a_deployment_is_asked_for_others_only() -> None:
    why = ((DeploymentId("d"), "it knows no option x"),)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", refused=why),),
        deployments=(a_deployment("d"), a_deployment("e")),
    )
    decided = plan_deployments(cluster)
    assert starts(decided) == [("e", "ams-1")]
    assert "ams-1: it refused one of this deployment: it knows no option x" in (
        decided.unmet[0].reason
    )


def test_a_model_without_weights_ends_no_plan() -> None:
    gpu = msgspec.structs.replace(a_device(79.0, "gpu0"), device_class="h100-80g")
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=(gpu,)),),
        models=(a_model("m", 0.0), a_model("other", 1.0)),
        deployments=(a_deployment("d"), a_deployment("e", "other")),
    )
    assert starts(plan_deployments(cluster)) == [("d", "ams-1"), ("e", "ams-1")]


def test_where_nobody_asks_what_rounding_leaves_of_a_room_ends_no_plan() -> None:
    flow = LoadAssignment(NO_FLOATS, NO_FLOATS, np.zeros((0, 1)), np.zeros(1), 5000.0)
    room = 0.7 * 2.020276102957687
    for _ in range(3):
        flow.add(0, room)
    for _ in range(3):
        flow.remove(0, room)
    assert flow.cost() == 0


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, 5e-324])
def test_a_rate_that_a_node_cannot_have_draws_nothing_there(rate: float) -> None:
    odd = a_node("sin-1", "sin", disk_bytes_per_s=rate, fetch_bytes_per_s=rate)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), odd, a_node("sin-2", "sin")),
        deployments=(a_deployment(replicas_max=9),),
        placements=(a_placement("r1", "ams-1"), a_placement("r2", "sin-2")),
        demand=(a_demand("ams", 0.5), a_demand("sin", 0.03)),
    )
    assert not plan_deployments(cluster).starts
    told = explain_placement(cluster, DeploymentId("d"))
    assert told is not None
    assert "warm in 6 s" in told.elsewhere[0].reason
