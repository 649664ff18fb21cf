"""Plans of chosen cluster states, and properties of plans of random ones."""

import math
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, DeviceId, Generation, NodeId, PopId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.report import ReplicaProfile, ReplicaState
from scheduler.decide.cluster import (
    ClusterState,
    DemandRate,
    MeasuredProfile,
    NodeRefusal,
    PlacementPlan,
    StartFailures,
)
from scheduler.decide.membership import judge_liveness
from scheduler.decide.placement.fleet.device_sharing import DeviceSharing
from scheduler.decide.placement.fleet.slots import free_memory, residency_allows
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.placement.retire import TERMINAL_STATES
from scheduler.decide.whatif import explain_placement
from scheduler.decide.whatif.simulation import apply_plan
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


def after_plan(cluster: ClusterState, plan: PlacementPlan, state: str = "warm") -> ClusterState:
    """Return the cluster state after a plan, with loading replicas in `state` too."""
    ended = {ending.replica_id for ending in plan.endings}
    kept = tuple(
        msgspec.structs.replace(p, state=ReplicaState(state))
        if p.state is ReplicaState.LOADING
        else p
        for p in cluster.placements
        if p.replica_id not in ended
    )
    started = tuple(start.placement(ReplicaState(state)) for start in plan.starts)
    return msgspec.structs.replace(
        cluster,
        placements=kept + started,
        generation=Generation(cluster.generation + 1),
    )


def starts(plan: PlacementPlan) -> list[tuple[str, str]]:
    return [(start.spec.deployment_id, start.node_id) for start in plan.starts]


def test_a_new_deployment_gets_its_minimum() -> None:
    plan = plan_deployments(a_cluster(nodes=NODES, deployments=(a_deployment(replicas_min=2),)))
    assert len(plan.starts) == 2
    assert len({start.node_id for start in plan.starts}) == 2  # spread over PoPs
    assert all("at least 2" in start.reason for start in plan.starts)


def test_a_pop_kept_warm_gets_a_replica_there() -> None:
    plan = plan_deployments(a_cluster(nodes=NODES, deployments=(a_deployment(keep_warm=("sin",)),)))
    assert starts(plan) == [("d", "sin-1")]


def test_demand_far_away_brings_a_replica_there() -> None:
    cluster = a_cluster(
        nodes=NODES,
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("sin", 1.0),),
    )
    plan = plan_deployments(cluster)
    assert starts(plan) == [("d", "sin-1")]
    assert "demand: saves" in plan.starts[0].reason


def test_negligible_demand_moves_nothing() -> None:
    cluster = a_cluster(
        nodes=NODES, placements=(a_placement("r1", "ams-1"),), demand=(a_demand("sin", 0.01),)
    )
    assert plan_deployments(cluster) == PlacementPlan(based_on=cluster.generation)


def test_the_replicas_of_a_lost_node_are_replaced_and_not_ended() -> None:
    nodes = (a_node("ams-1", "ams", silent_s=45.0), *NODES[1:])
    plan = plan_deployments(a_cluster(nodes=nodes, placements=(a_placement("r1", "ams-1"),)))
    assert len(plan.starts) == 1
    assert plan.starts[0].node_id != "ams-1"
    assert not plan.endings


def test_mass_silence_moves_nothing_and_says_why() -> None:
    nodes = tuple(msgspec.structs.replace(node, silent_s=60.0) for node in NODES)
    plan = plan_deployments(a_cluster(nodes=nodes, placements=(a_placement("r1", "ams-1"),)))
    assert not plan.starts
    assert not plan.endings
    assert "3 of 3 nodes are silent" in plan.frozen


SILENT = tuple(a_node(f"fra-{i}", "fra", silent_s=60.0) for i in range(5))
"""More silent nodes than `NODES` has: the fleet is frozen."""


def test_a_frozen_fleet_replaces_failed_replicas_on_nodes_in_contact_and_no_others() -> None:
    cluster = a_cluster(
        nodes=(*NODES, *SILENT),
        deployments=(a_deployment(replicas_min=3), a_deployment("other", replicas_min=2)),
        placements=(
            a_placement("r1", "ams-1", state="failed", state_reason="oom"),
            a_placement("r2", "fra-0"),
            a_placement("r3", "fra-1", state="failed"),
        ),
    )
    plan = plan_deployments(cluster)
    assert "5 of 8 nodes are silent" in plan.frozen
    assert [ending.replica_id for ending in plan.endings] == ["r1"]
    assert len(plan.starts) == 1
    assert plan.starts[0].spec.deployment_id == "d"
    assert plan.starts[0].node_id in {"iad-1", "sin-1"}
    again = plan_deployments(after_plan(cluster, plan))
    assert (again.starts, again.endings) == ((), ())
    assert again.frozen


@pytest.mark.parametrize(("ago_s", "count"), [(1.0, 0), (60.0, 1)])
def test_a_frozen_fleet_starts_what_waited_for_its_backoff(ago_s: float, count: int) -> None:
    cluster = a_cluster(nodes=(*NODES, *SILENT), given_up=(start_failures(2, ago_s),))
    plan = plan_deployments(cluster)
    assert plan.frozen
    assert len(plan.starts) == count


def test_a_draining_node_is_left_only_when_another_is_warm() -> None:
    nodes = (a_node("ams-1", "ams", draining=True), *NODES[1:])
    cluster = a_cluster(nodes=nodes, placements=(a_placement("r1", "ams-1"),))
    first = plan_deployments(cluster)
    assert len(first.starts) == 1
    assert not first.endings
    coming = after_plan(cluster, first, "loading")
    assert not plan_deployments(coming).endings
    second = plan_deployments(after_plan(cluster, first, "warm"))
    assert [ending.replica_id for ending in second.endings] == ["r1"]
    assert "draining" in second.endings[0].reason


def test_a_replica_on_an_unhealthy_device_moves_once_another_is_warm() -> None:
    gpus = tuple(
        a_device(8.0, name, healthy=name == "gpu1", reason="GPU is lost")
        for name in ("gpu0", "gpu1")
    )
    lost = a_placement("r1", "ams-1", device_ids=(DeviceId("gpu0"),))
    cluster = a_cluster(nodes=(a_node("ams-1", "ams", devices=gpus),), placements=(lost,))
    first = plan_deployments(cluster)
    assert [start.spec.device_ids for start in first.starts] == [("gpu1",)]
    assert not first.endings
    second = plan_deployments(after_plan(cluster, first, "warm"))
    assert [ending.replica_id for ending in second.endings] == ["r1"]
    assert second.endings[0].reason == (
        "gpu0 of node ams-1 is unhealthy (GPU is lost), others are warm"
    )


def test_a_replica_on_an_unhealthy_device_stays_while_no_other_is_free() -> None:
    device = a_device(8.0, healthy=False)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=(device,)),), placements=(a_placement("r1", "ams-1"),)
    )
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert not plan.endings


def test_replicas_of_one_failure_domain_separate_when_another_node_is_free() -> None:
    # As after a drain of ams-1 that was reverted: both replicas on the only other node.
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("ams-2", "ams")),
        deployments=(a_deployment(replicas_min=2, replicas_max=2),),
        placements=(a_placement("r1", "ams-2"), a_placement("r2", "ams-2")),
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "ams-1")]
    assert not first.endings
    assert first.starts[0].reason == "the others would all fail with ams-2"
    separated = after_plan(cluster, first)
    second = plan_deployments(separated)
    assert [ending.node_id for ending in second.endings] == ["ams-2"]
    assert not second.starts
    third = plan_deployments(after_plan(separated, second))
    assert not third.starts
    assert not third.endings


def test_a_slow_node_that_separates_replicas_keeps_its_own() -> None:
    # Its replica is missed least, but without it the others would all fail together again.
    slow = msgspec.structs.replace(a_device(4.0, "gpu0"), device_class="l4-24g")
    profiles = tuple(
        MeasuredProfile(
            model_id="m",
            device_class=name,
            profile=ReplicaProfile(prefill_tokens_per_s=rate, decode_tokens_per_s=rate),
        )
        for name, rate in (("cpu", 1000.0), ("l4-24g", 100.0))
    )
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=(slow,)), a_node("ams-2", "ams")),
        deployments=(a_deployment(replicas_min=2, replicas_max=2),),
        placements=(a_placement("r1", "ams-2"), a_placement("r2", "ams-2")),
        demand=(a_demand("ams", 1000.0),),
        profiles=profiles,
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "ams-1")]
    separated = after_plan(cluster, first)
    second = plan_deployments(separated)
    assert [ending.node_id for ending in second.endings] == ["ams-2"]
    third = plan_deployments(after_plan(separated, second))
    assert not third.starts
    assert not third.endings


def test_the_replica_that_separates_the_others_is_not_moved_to_their_node() -> None:
    # The new one on ams-2 would end at once as surplus, and start again with the next plan.
    slow = msgspec.structs.replace(a_device(4.0, "gpu0"), device_class="l4-24g")
    profiles = tuple(
        MeasuredProfile(
            model_id="m",
            device_class=name,
            profile=ReplicaProfile(prefill_tokens_per_s=rate, decode_tokens_per_s=rate),
        )
        for name, rate in (("cpu", 1000.0), ("l4-24g", 100.0))
    )
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=(slow,)), a_node("ams-2", "ams")),
        deployments=(a_deployment(replicas_min=2, replicas_max=3),),
        placements=(
            a_placement("r1", "ams-1", device_ids=(DeviceId("gpu0"),)),
            a_placement("r2", "ams-2"),
            a_placement("r3", "ams-2"),
        ),
        demand=(a_demand("ams", 1000.0),),
        profiles=profiles,
    )
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert not plan.endings


def test_surplus_ends_in_the_shared_failure_domain_first() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("ams-2", "ams")),
        placements=(
            a_placement("r1", "ams-2"),
            a_placement("r2", "ams-2"),
            a_placement("youngest", "ams-1", age_s=1000.0),
        ),
    )
    assert [ending.node_id for ending in plan_deployments(cluster).endings] == ["ams-2"]


def test_the_plan_does_not_depend_on_the_order_of_demand_rows() -> None:
    demand = tuple(a_demand(pop, 3.0 if pop == "sin" else 0.001) for pop in sorted(PLACES))
    cluster = a_cluster(
        nodes=tuple(a_node(f"{pop}-1", pop) for pop in sorted(PLACES)), demand=demand
    )
    in_one_pop = starts(plan_deployments(cluster))
    assert ("d", "sin-1") in in_one_pop
    assert (
        starts(plan_deployments(msgspec.structs.replace(cluster, demand=demand[::-1])))
        == in_one_pop
    )


def test_a_new_version_replaces_the_old_when_it_is_warm() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(version=2),),
        placements=(a_placement("r1", "ams-1"),),
    )
    first = plan_deployments(cluster)
    assert len(first.starts) == 1
    assert not first.endings
    second = plan_deployments(after_plan(cluster, first))
    assert [ending.replica_id for ending in second.endings] == ["r1"]


def test_a_new_version_without_a_slot_beside_the_old_one_is_reported() -> None:
    old = a_placement("r1", "n1", memory_bytes=6 * GIB, age_s=1000.0)
    full = a_cluster(
        nodes=(a_node("n1", "ams"),),
        models=(a_model(gib=5.0),),
        deployments=(a_deployment(version=2),),
        placements=(old,),
    )
    plan = plan_deployments(full)
    assert (plan.starts, plan.endings) == ((), ())
    (unmet,) = plan.unmet
    assert "version 2" in unmet.reason
    assert "the most free on one device is 2.00 GiB" in unmet.reason
    assert unmet.reason.endswith(". To start it, free 3.25 GiB on n1")
    enlarged = msgspec.structs.replace(full, nodes=(a_node("n1", "ams", gib=16.0),))
    assert plan_deployments(enlarged).unmet == ()
    nearly = msgspec.structs.replace(full, nodes=(a_node("n1", "ams", gib=11.247),))
    (unmet,) = plan_deployments(nearly).unmet
    assert "most free on one device is 5.25 GiB: 4 MiB too little. To start it," in unmet.reason
    assert unmet.reason.endswith("free 4 MiB on n1")


def test_a_version_without_a_slot_is_told_what_would_free_memory() -> None:
    larger = a_deployment(version=2, engine=EngineSettings(kv_memory_bytes=4 * GIB))
    nodes = (a_node("n1", "ams", gib=10.0), a_node("n2", "ams", gib=6.0))
    cluster = a_cluster(
        nodes=nodes,
        models=(a_model(gib=2.0),),
        deployments=(larger,),
        placements=(a_placement("r1", "n1", memory_bytes=5 * GIB, age_s=1000.0),),
    )
    (unmet,) = plan_deployments(cluster).unmet
    before, advice = unmet.reason.split(". To start it, ")
    assert "n1: needs 6.25 GiB" in before
    fits = 4 * GIB - 5 * GIB // 4
    assert advice == f"free 1.25 GiB on n1, or set kv_memory_bytes to {fits} or less"
    smaller = a_deployment(version=2, engine=EngineSettings(kv_memory_bytes=fits))
    assert plan_deployments(msgspec.structs.replace(cluster, deployments=(smaller,))).unmet == ()
    draining = tuple(msgspec.structs.replace(node, draining=True) for node in nodes)
    (unmet,) = plan_deployments(msgspec.structs.replace(cluster, nodes=draining)).unmet
    assert "To start it" not in unmet.reason


def test_an_old_version_that_may_not_end_and_blocks_its_successor_is_reported() -> None:
    # One replica of each version, and no memory for a third: two are required.
    mixed = a_cluster(
        nodes=(a_node("n1", "ams", gib=11.0),),
        models=(a_model(gib=4.0),),
        deployments=(a_deployment(version=2, replicas_min=2),),
        placements=(
            a_placement("old", "n1", memory_bytes=5 * GIB, age_s=1000.0),
            a_placement("new", "n1", memory_bytes=5 * GIB, age_s=900.0, version=2),
        ),
    )
    plan = plan_deployments(mixed)
    assert (plan.starts, plan.endings) == ((), ())
    (unmet,) = plan.unmet
    assert "version 2" in unmet.reason
    assert "the most free on one device is 1.00 GiB" in unmet.reason
    assert ". To start it, free 3.25 GiB on n1, or set replicas_min to 1, so" in unmet.reason
    enlarged = msgspec.structs.replace(mixed, nodes=(a_node("n1", "ams", gib=16.0),))
    assert plan_deployments(enlarged).unmet == ()
    one = a_deployment(version=2, replicas_min=1)
    fewer = msgspec.structs.replace(mixed, deployments=(one,))
    assert [ending.replica_id for ending in plan_deployments(fewer).endings] == ["old"]


def test_a_loading_replica_does_not_end_an_old_one() -> None:
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


@pytest.mark.parametrize(
    ("old", "endings"),
    [
        ({"state": "wanted", "restarts": 2}, ["old"]),
        ({"state": "loading", "restarts": 4}, ["old"]),
        ({"state": "loading", "restarts": 1}, []),
        ({"state": "warm", "restarts": 4}, []),
    ],
)
def test_a_broken_old_version_does_not_restart_beside_its_successor(
    old: dict[str, Any], endings: list[str]
) -> None:
    new = a_placement("new", "ams-1", version=2, state="loading")
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(version=2),),
        placements=(a_placement("old", "ams-1", **old), new),
    )
    assert [ending.replica_id for ending in plan_deployments(cluster).endings] == endings
    # Before the new version has a replica, the old one may still become warm.
    alone = msgspec.structs.replace(cluster, placements=cluster.placements[:1])
    assert plan_deployments(alone).endings == ()


def test_a_preempted_replica_does_not_count_for_a_draining_one() -> None:
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
    plan = plan_deployments(cluster)
    assert [ending.replica_id for ending in plan.endings] == ["r1"]
    assert "oom" in plan.endings[0].reason
    assert plan.starts[0].node_id != "ams-1"


def start_failures(times: int, ago_s: float, version: int = 1) -> StartFailures:
    return StartFailures(
        deployment_id=DeploymentId("d"),
        version=version,
        times=times,
        ago_s=ago_s,
        node_ids=(NodeId("ams-1"),),
        reason="broke 6 times: no such option",
    )


@pytest.mark.parametrize(
    ("given_up", "is_waiting"),
    [
        (start_failures(1, 1.0), True),
        (start_failures(1, 3.0), False),
        (start_failures(4, 15.0), True),  # the wait doubles each time
        (start_failures(4, 17.0), False),
        (start_failures(10**6, 49.0), True),
        (start_failures(10**6, 51.0), False),  # but never exceeds a minute
        (start_failures(9, 0.0, version=7), False),  # and another version is tried at once
    ],
)
def test_a_version_that_fails_on_every_node_backs_off(
    given_up: StartFailures, is_waiting: bool
) -> None:
    cluster = a_cluster(nodes=NODES, given_up=(given_up,))
    plan = plan_deployments(cluster)
    assert bool(plan.starts) is not is_waiting
    reasons = " ".join(unmet.reason for unmet in plan.unmet)
    assert ("no such option; it is tried again" in reasons) is is_waiting
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert explained.unmet == tuple(unmet.reason for unmet in plan.unmet)
    assert any(row.feasible for row in explained.elsewhere) is not is_waiting


def test_nodes_without_recent_failures_are_tried_first() -> None:
    plans = plan_deployments(a_cluster(nodes=NODES, given_up=(start_failures(1, 100.0),)))
    assert plans.starts[0].node_id != "ams-1"
    only = plan_deployments(
        a_cluster(nodes=(a_node("ams-1", "ams"),), given_up=(start_failures(1, 100.0),))
    )
    assert only.starts[0].node_id == "ams-1"
    explained = explain_placement(
        a_cluster(nodes=NODES, given_up=(start_failures(1, 100.0),)), DeploymentId("d")
    )
    assert explained is not None
    assert [row.reason[:17] for row in explained.elsewhere if row.node_id == "ams-1"] == [
        "1 of its replicas"
    ]
    all_of_them = tuple(NodeId(name) for name in ("ams-1", "iad-1", "sin-1", "ams-1", "iad-1"))
    again = msgspec.structs.replace(start_failures(5, 100.0), node_ids=all_of_them)
    assert plan_deployments(a_cluster(nodes=NODES, given_up=(again,))).starts[0].node_id == "sin-1"


def test_with_one_replica_warm_a_failed_one_is_retried_elsewhere_at_once() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(replicas_min=2),),
        placements=(a_placement("r1", "sin-1"),),
        given_up=(start_failures(5, 0.0),),
    )
    assert plan_deployments(cluster).starts


def test_an_impossible_placement_is_reported_with_numbers_and_ends_nothing() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=2.0),),
        deployments=(a_deployment(replicas_min=2),),
        placements=(a_placement("r1", "ams-1"),),
    )
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert not plan.endings
    assert "needs 1.25 GiB, the most free on one device is 0.75 GiB" in plan.unmet[0].reason


def test_a_replica_that_residency_no_longer_allows_ends_at_once() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(a_deployment(deny=("NL",)),),
        placements=(a_placement("r1", "ams-1"),),
    )
    plan = plan_deployments(cluster)
    assert [ending.replica_id for ending in plan.endings] == ["r1"]
    assert all(start.node_id != "ams-1" for start in plan.starts)


def test_all_replicas_of_a_deleted_deployment_end() -> None:
    cluster = a_cluster(
        nodes=NODES,
        deployments=(),
        deleted=(DeploymentId("d"),),
        placements=(a_placement("r1", "ams-1"), a_placement("r2", "sin-1")),
    )
    assert len(plan_deployments(cluster).endings) == 2


def test_surplus_ends_after_it_has_settled_and_never_below_the_minimum() -> None:
    both = (a_placement("r1", "ams-1"), a_placement("r2", "sin-1"))
    cluster = a_cluster(nodes=NODES, placements=both)
    plan = plan_deployments(cluster)
    assert len(plan.endings) == 1
    assert not plan_deployments(after_plan(cluster, plan)).endings
    young = tuple(msgspec.structs.replace(p, age_s=30.0) for p in both)
    assert not plan_deployments(msgspec.structs.replace(cluster, placements=young)).endings


def test_nothing_ends_for_lack_of_demand_while_demand_is_not_known() -> None:
    """After an outage of the schedulers the store has no demand until routers have reported."""
    old = tuple(a_placement(f"o{n}", f"ams-{n}") for n in range(1, 5))
    new = a_placement("n1", "sin-1", version=2)
    nodes = tuple(a_node(f"{pop}-{n}", pop) for pop in ("ams", "sin") for n in range(1, 5))
    for version, placements in ((1, old), (2, (*old, new))):
        cluster = a_cluster(
            nodes=nodes,
            deployments=(a_deployment(replicas_max=8, version=version),),
            placements=placements,
        )
        assert plan_deployments(cluster).endings
        unknown = msgspec.structs.replace(cluster, is_demand_known=False)
        assert plan_deployments(unknown) == PlacementPlan(based_on=cluster.generation)


def test_a_replica_of_a_forecast_stays_until_there_is_another_forecast() -> None:
    both = (a_placement("r1", "ams-1"), a_placement("r2", "sin-1"))
    cluster = a_cluster(nodes=NODES, placements=both, is_forecast_known=False)
    assert not plan_deployments(cluster).endings
    fewer = (a_deployment(replicas_max=1),)
    cluster = msgspec.structs.replace(cluster, deployments=fewer)
    assert len(plan_deployments(cluster).endings) == 1, "the policy allows one"


def test_a_draining_node_keeps_its_last_replica_while_demand_is_not_known() -> None:
    nodes = (a_node("ams-1", "ams", draining=True),)
    cluster = a_cluster(
        nodes=nodes,
        deployments=(a_deployment(replicas_min=0),),
        placements=(a_placement("r1", "ams-1"),),
    )
    assert len(plan_deployments(cluster).endings) == 1
    unknown = msgspec.structs.replace(cluster, is_demand_known=False)
    assert not plan_deployments(unknown).endings


def test_two_replicas_in_one_pop_are_spread_once_they_have_settled() -> None:
    in_one_pop = (a_placement("r1", "ams-1"), a_placement("r2", "ams-1"))
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams"), a_node("sin-1", "sin")),
        deployments=(a_deployment(replicas_min=2, replicas_max=2),),
        placements=in_one_pop,
    )
    first = plan_deployments(cluster)
    assert starts(first) == [("d", "sin-1")]
    assert first.starts[0].reason == "worth more here than in ams"
    assert not first.endings
    assert plan_deployments(after_plan(cluster, first, "loading")) == PlacementPlan(
        based_on=Generation(8)
    )
    second = plan_deployments(after_plan(cluster, first))
    assert len(second.endings) == 1
    assert second.endings[0].node_id == "ams-1"
    assert not second.starts
    spread = after_plan(after_plan(cluster, first), second)
    assert plan_deployments(spread) == PlacementPlan(based_on=spread.generation)
    young = tuple(msgspec.structs.replace(p, age_s=30.0) for p in in_one_pop)
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
    moved = after_plan(cluster, first)
    assert [ending.replica_id for ending in plan_deployments(moved).endings] == ["r1"]
    # Small demand is not worth a start; residency and keep_warm also hold the replica.
    little = msgspec.structs.replace(cluster, demand=(a_demand("sin", 0.05),))
    assert plan_deployments(little) == PlacementPlan(based_on=cluster.generation)
    kept = a_deployment(replicas_max=1, keep_warm=("ams",))
    denied = a_deployment(replicas_max=1, deny=("sin",))
    for held in (kept, denied):
        assert not plan_deployments(msgspec.structs.replace(cluster, deployments=(held,))).starts


def test_a_keep_warm_pop_does_not_wait_until_replicas_have_settled() -> None:
    """As after a drain: all replicas allowed are elsewhere, and have just started."""
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
    moved = after_plan(cluster, first)
    second = plan_deployments(moved)
    assert [ending.replica_id for ending in second.endings] == ["r2"]
    assert plan_deployments(after_plan(moved, second)) == PlacementPlan(
        based_on=Generation(moved.generation + 1)
    )
    # Without a free slot there, young replicas stay where they are.
    full = msgspec.structs.replace(cluster, nodes=(*NODES[:2], a_node("sin-1", "sin", devices=())))
    assert not plan_deployments(full).starts


def test_a_keep_warm_pop_without_a_slot_is_reported_at_the_maximum_of_replicas_too() -> None:
    cluster = a_cluster(
        nodes=(NODES[0], a_node("sin-1", "sin", gib=1.0)),
        deployments=(a_deployment(replicas_max=1, keep_warm=("sin",)),),
        placements=(a_placement("r1", "ams-1"),),
    )
    plan = plan_deployments(cluster)
    assert not plan.starts
    assert [row.reason for row in plan.unmet] == [
        "cannot place a replica (sin is kept warm): sin-1: needs 1.25 GiB, the most free on one "
        "device is 1.00 GiB"
    ]
    # Where there is a slot, the replica moves there with this plan.
    moved = plan_deployments(msgspec.structs.replace(cluster, nodes=NODES))
    assert starts(moved) == [("d", "sin-1")]
    assert not moved.unmet


def test_a_first_replica_does_not_take_the_only_start_from_one_that_would_preempt_it() -> None:
    """It would start, settle, end for the other, and start again first: without end."""
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=3.0),),
        deployments=tuple(a_deployment(name, replicas_min=0) for name in ("d", "e")),
        placements=(a_placement("r1", "ams-1"),),
        demand=(a_demand("ams", 100.0), a_demand("ams", 0.1, "e")),
    )
    few = PlanLimits(starts_max=1, thorough_effort=0)
    assert starts(plan_deployments(cluster, few)) == [("d", "ams-1")]
    assert starts(plan_deployments(cluster)) == [("d", "ams-1")]


def test_an_idle_deployment_without_a_minimum_scales_to_zero_and_back_with_demand() -> None:
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


def test_a_replica_without_demand_leaves_a_draining_node() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", draining=True),),
        deployments=(a_deployment(replicas_min=0),),
        placements=(a_placement("r1", "ams-1"),),
    )
    assert [ending.replica_id for ending in plan_deployments(cluster).endings] == ["r1"]
    wanted = msgspec.structs.replace(cluster, demand=(a_demand("ams", 1.0),))
    assert not plan_deployments(wanted).endings  # there is no other node, so it keeps serving


def test_explain_names_the_deployments_that_fill_a_node() -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", gib=2.6),),
        deployments=(
            a_deployment("a", replicas_min=2, priority=90),
            a_deployment("b", replicas_min=2, priority=10),
        ),
    )
    plan = plan_deployments(cluster)
    assert [start.spec.deployment_id for start in plan.starts] == ["a", "a"]
    shuffled = explain_placement(after_plan(cluster, plan), DeploymentId("b"))
    assert shuffled is not None
    assert [row.reason for row in shuffled.elsewhere] == [
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


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"silent_s": 12.0}, "nothing was heard from ams-1 for 12 s"),
        ({"silent_s": 48.0}, "nothing was heard from ams-1 for 48 s, which counts as lost"),
        ({"draining": True}, "ams-1 is draining: the replica ends once others are warm"),
        ({}, ""),
    ],
)
def test_explain_says_what_the_node_of_a_replica_does(node: dict[str, Any], reason: str) -> None:
    others = [a_node(name, name[:3]) for name in ("iad-1", "sin-1")]
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", **node), *others), placements=(a_placement("r1", "ams-1"),)
    )
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert explained.here[0].state_reason == reason


@pytest.mark.parametrize("replicas_min", [0, 1])
def test_the_only_warm_replica_is_preempted_once_another_is_warm(replicas_min: int) -> None:
    nodes = (
        a_node("ams-1", "ams", devices=(a_device(4.0, "gpu0"), a_device(4.0, "gpu1"))),
        a_node("fra-1", "fra", gib=2.0),
    )
    cluster = a_cluster(
        nodes=nodes,
        models=(a_model(), a_model("big", gib=3.0)),
        deployments=(
            a_deployment(replicas_min=replicas_min, replicas_max=2, priority=28),
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
    second = plan_deployments(after_plan(cluster, first))
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
            refused=draw(st.sampled_from([(), (), (NodeRefusal(DeploymentId("d0"), "no"),)])),
            lacking_engines=draw(st.sampled_from([{}, {}, {}, {"mock": "not installed"}])),
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
        replicas_min = draw(st.integers(0, 3))
        deployments.append(
            a_deployment(
                f"d{index}",
                draw(st.sampled_from(["m", "m", "big", "empty"])),
                version=draw(st.integers(1, 2)),
                replicas_min=replicas_min,
                replicas_max=draw(st.one_of(st.integers(replicas_min, 4), st.just(0))),
                keep_warm=tuple(draw(st.lists(st.sampled_from([*pops, "xyz"]), max_size=1))),
                deny=tuple(draw(st.lists(st.sampled_from(["NL", "sin"]), max_size=1))),
                priority=draw(st.integers(0, 100)),
                overcommit=draw(st.sampled_from([1.0, 1.0, 1.0, 4.0])),
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
    # Placements that an earlier plan made, so that the cluster state is a possible one.
    earlier = plan_deployments(msgspec.structs.replace(empty, generation=Generation(1)))
    states = ["warm", "warm", "loading", "failed"]
    placed = after_plan(empty, earlier)
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
def test_no_device_holds_more_than_its_memory_asleep_or_awake(cluster: ClusterState) -> None:
    after = after_plan(
        cluster, PlacementPlan(based_on=cluster.generation, starts=plan_deployments(cluster).starts)
    )
    free = free_memory(after.nodes, after.placements)
    assert all(left >= 0 for left in free.values())
    sharing = DeviceSharing(after)
    if sharing.is_used:
        assert all(sharing.bytes_for(key, overcommit=1.0) >= 0 for key in free)


@settings(deadline=None, max_examples=150)
@given(cluster=clusters())
def test_residency_liveness_and_bounds_hold_for_every_start(cluster: ClusterState) -> None:
    plan = plan_deployments(cluster)
    limits = PlanLimits()
    nodes = {node.node_id: node for node in cluster.nodes}
    pops = {pop.pop: pop for pop in cluster.pops}
    policies = {d.deployment_id: d.policy for d in cluster.deployments}
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    assert len(plan.starts) <= limits.starts_max
    assert len(plan.endings) <= limits.endings_max
    for start in plan.starts:
        assert len({part.node_id for part in start.parts}) == start.spec.engine.nodes
        assert len({nodes[part.node_id].pop for part in start.parts}) == 1
        for part in start.parts:
            node = nodes[part.node_id]
            assert residency_allows(policies[part.spec.deployment_id], pops[node.pop])
            assert not (node.draining or node.revoked)
            assert node.refusal_of(part.spec.deployment_id, part.spec.version) is None
            assert part.spec.engine.driver not in node.lacking_engines
            assert view.by_node[node.node_id].value == "ready"
            assert part.reason
            devices = [d for d in node.devices if d.device_id in part.spec.device_ids]
            assert len(devices) == part.spec.engine.devices_per_node
            assert all(device.healthy for device in devices)
            assert len({device.device_class for device in devices}) == 1
    ids = [start.spec.replica_id for start in plan.starts]
    assert len(set(ids)) == len(ids)
    assert not {p.replica_id for p in cluster.placements} & set(ids)
    started = Counter(start.spec.deployment_id for start in plan.starts)
    ended = {ending.replica_id for ending in plan.endings}
    running = Counter(p.deployment_id for p in cluster.placements if p.replica_id not in ended)
    for deployment_id, count in started.items():
        most = policies[deployment_id].replicas_max
        assert most > 0
        assert running[deployment_id] + count <= most + limits.surge_max
    if plan.frozen:
        failed = {
            placement.replica_id
            for placement in cluster.placements
            if placement.state in TERMINAL_STATES
            and view.by_node[placement.node_id].value == "ready"
        }
        assert {ending.replica_id for ending in plan.endings} <= failed
        assert len(plan.starts) <= len(failed)


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_the_same_cluster_state_gives_the_same_plan(cluster: ClusterState) -> None:
    assert plan_deployments(cluster) == plan_deployments(cluster)


@settings(deadline=None, max_examples=100)
@given(cluster=clusters(), chance=st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_rows(
    cluster: ClusterState, chance: Random
) -> None:
    shuffled = {
        name: tuple(chance.sample(rows, len(rows)))
        for name in ("pops", "nodes", "models", "deployments", "placements")
        for rows in [getattr(cluster, name)]
    }
    one, other = (
        plan_deployments(cluster),
        plan_deployments(msgspec.structs.replace(cluster, **shuffled)),
    )
    assert one.starts == other.starts
    assert {(e.replica_id, e.reason) for e in one.endings} == {
        (e.replica_id, e.reason) for e in other.endings
    }


@settings(deadline=None, max_examples=50)
@given(cluster=clusters())
def test_a_plan_never_starts_what_explain_calls_infeasible(cluster: ClusterState) -> None:
    for start in plan_deployments(cluster).starts:
        explained = explain_placement(cluster, start.spec.deployment_id)
        assert explained is not None
        assert any(start.spec.replica_id in move for move in explained.next_moves)
        refused = {row.node_id for row in explained.elsewhere if not row.feasible}
        assert refused.isdisjoint(part.node_id for part in start.parts)


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_repeated_plans_reach_a_stable_state(cluster: ClusterState) -> None:
    for _ in range(40):
        plan = plan_deployments(cluster)
        if not plan.starts and not plan.endings:
            return
        cluster = after_plan(cluster, plan)
    pytest.fail(f"still moving after 40 plans: {plan}")


@st.composite
def scarce_clusters(draw: st.DrawFn) -> ClusterState:
    """Deployments of small models and one large one that compete for the memory of a few nodes."""
    nodes = tuple(
        a_node(f"n{index}", draw(st.sampled_from(["ams", "ams", "sin"])), size, failure_domain=rack)
        for index, size in enumerate(
            draw(st.lists(st.sampled_from([3.0, 6.0]), min_size=1, max_size=3))
        )
        for rack in [draw(st.sampled_from(["", "rack"]))]
    )
    deployments = tuple(
        a_deployment(
            f"d{index}",
            "m" if index else "big",
            replicas_min=draw(st.integers(0, 2)),
            replicas_max=draw(st.integers(2, 4)),
            priority=draw(st.sampled_from([40, 50, 60])),
        )
        for index in range(draw(st.integers(2, 6)))
    )
    demand = tuple(
        a_demand(
            draw(st.sampled_from(["ams", "sin"])),
            draw(st.sampled_from([0.01, 1.0, 100.0])),
            deployment.deployment_id,
        )
        for deployment in deployments
    )
    models = (a_model("m", 1.0), a_model("big", 2.0))
    return a_cluster(nodes=nodes, models=models, deployments=deployments, demand=demand)


@settings(deadline=None, max_examples=100)
@given(cluster=st.one_of(scarce_clusters(), clusters()), starts_max=st.sampled_from([1, 2, 8]))
def test_a_fleet_that_ages_reaches_a_stable_state(cluster: ClusterState, starts_max: int) -> None:
    """One plan a minute, as large fleets get them: replicas that have settled may move, too."""
    limits, quiet = PlanLimits(starts_max=starts_max, thorough_effort=0), 0
    for _ in range(80):
        plan = plan_deployments(cluster, limits)
        quiet = 0 if plan.starts or plan.endings or plan.role_changes else quiet + 1
        if quiet > limits.settle_s / 60:
            return
        cluster = apply_plan(cluster, plan)
    pytest.fail(f"still moving after 80 plans: {plan}")


@settings(deadline=None, max_examples=100)
@given(cluster=clusters())
def test_the_minimum_is_met_where_possible(cluster: ClusterState) -> None:
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    if view.frozen:
        return
    cluster = after_plan(cluster, PlacementPlan(based_on=cluster.generation))
    for _ in range(40):
        plan = plan_deployments(cluster)
        if not plan.starts and not plan.endings:
            break
        cluster = after_plan(cluster, plan)
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
def test_the_last_warm_replica_is_never_preempted(cluster: ClusterState) -> None:
    plan = plan_deployments(cluster)
    ended = {ending.replica_id for ending in plan.endings}
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


def test_gib_is_1024_cubed() -> None:
    assert a_model(gib=2.0).weights_bytes == 2 * GIB


def test_a_running_replica_changes_its_role_without_a_start() -> None:
    deployment = a_deployment(replicas_min=2, keep_warm=("ams",), roles="prefill=1,decode=1")
    placements = (
        a_placement("r1", "ams-1"),
        a_placement("r2", "ams-2", age_s=5000.0),
    )
    nodes = (a_node("ams-1", "ams"), a_node("ams-2", "ams"))
    cluster = a_cluster(nodes=nodes, deployments=(deployment,), placements=placements)
    plan = plan_deployments(cluster)
    assert (plan.starts, plan.endings) == ((), ())
    assert [(change.replica_id, change.role) for change in plan.role_changes] == [("r2", "prefill")]
    assert not plan.is_empty
    # Then nothing is left to do; and nothing is done while a replica is not warm.
    settled = apply_plan(cluster, plan)
    assert plan_deployments(settled).is_empty
    loading = msgspec.structs.replace(placements[0], state=ReplicaState.LOADING)
    starting = msgspec.structs.replace(cluster, placements=(loading, placements[1]))
    assert not plan_deployments(starting).role_changes
