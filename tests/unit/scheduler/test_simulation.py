"""Simulated changes to a snapshot: planned until stable, predicted, and repeatable."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, DeviceId, NodeId, PopId
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.cluster import ClusterState, DemandRate, MeasuredProfile
from scheduler.decide.membership import LivenessLimits
from scheduler.decide.placement import plan_fleet
from scheduler.decide.whatif.predict import FleetPrediction, predict_service
from scheduler.decide.whatif.simulation import (
    AddDeployment,
    AddNodes,
    Change,
    ClusterSnapshot,
    InvalidChange,
    LoseNode,
    LosePop,
    ScaleDemand,
    apply_change,
    plan_digest,
    what_if,
)
from tests.builders import (
    GIB,
    a_cluster,
    a_deployment,
    a_device,
    a_model,
    a_node,
    a_placement,
    a_pop,
)

AMS, SIN, IAD = PopId("ams"), PopId("sin"), PopId("iad")
NODES = tuple(a_node(f"{pop}-{n}", pop) for pop in ("ams", "iad", "sin") for n in (1, 2))


def demand_of(pop: str, requests: float, deployment: str = "d") -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId(deployment),
        pop=PopId(pop),
        requests_per_s=requests,
        uncached_tokens_per_s=40 * requests,
        output_tokens_per_s=4 * requests,
    )


def a_snapshot(**fields: Any) -> ClusterSnapshot:
    defaults: dict[str, Any] = {
        "nodes": NODES,
        "deployments": (a_deployment(replicas_max=6),),
        "placements": (a_placement("r1", "ams-1"),),
        "demand": (demand_of("ams", 2.0), demand_of("sin", 1.0)),
    }
    return ClusterSnapshot(cluster=a_cluster(**{**defaults, **fields}))


def saved_and_read(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Return the snapshot after it was written to a file and read again."""
    return msgspec.json.decode(msgspec.json.encode(snapshot), type=ClusterSnapshot)


def test_a_saved_snapshot_replays_bit_for_bit() -> None:
    odd = (demand_of("ams", 0.1 + 0.2), demand_of("sin", 1 / 3))
    snapshot = a_snapshot(demand=odd)
    assert saved_and_read(snapshot) == snapshot
    here, there = (
        plan_fleet(one.cluster, one.liveness) for one in (snapshot, saved_and_read(snapshot))
    )
    assert msgspec.json.encode(here) == msgspec.json.encode(there)
    assert plan_digest(here) == plan_digest(there)
    assert what_if(snapshot, []) == what_if(saved_and_read(snapshot), [])


def test_an_inconsistent_snapshot_is_refused_with_a_reason() -> None:
    snapshot = a_snapshot()
    for spoilt, words in (
        ({"format": 2, "release": "9.9"}, "its format is 2, this release reads 1: .* release 9.9"),
        ({"cluster": {"pops": []}}, "node ams-1 is in ams, which is not in it"),
        (
            {"cluster": {"pops": 2 * [msgspec.to_builtins(a_pop("ams"))]}},
            "it has the PoP ams twice",
        ),
        (
            {"cluster": {"nodes": 2 * [msgspec.to_builtins(NODES[0])]}},
            "it has the node ams-1 twice",
        ),
    ):
        file = msgspec.json.decode(msgspec.json.encode(snapshot))
        file |= spoilt | {"cluster": file["cluster"] | spoilt.get("cluster", {})}
        with pytest.raises(msgspec.ValidationError, match=words):
            msgspec.json.decode(msgspec.json.encode(file), type=ClusterSnapshot)


def test_a_deployment_without_its_model_is_reported_and_serves_nothing() -> None:
    answer = what_if(a_snapshot(models=()), [])
    assert answer.unmet == ("d: the catalogue has no model m",)
    assert all(city.ttft_p90_ms is None for city in answer.now.cities)


def test_a_price_of_an_unknown_class_is_refused() -> None:
    with pytest.raises(InvalidChange, match="cannot price h100: the device classes are cpu"):
        what_if(a_snapshot(), [], {"cpu": 1.0, "h100": 2.5})


def test_without_changes_the_result_is_the_next_plan() -> None:
    answer = what_if(a_snapshot(), [])
    assert answer.digest == plan_digest(plan_fleet(a_snapshot().cluster, LivenessLimits()))
    assert answer.is_at_rest
    assert {move.kind for move in answer.moves} <= {"start", "end"}
    assert answer.then.replicas >= answer.now.replicas


def test_the_demand_of_a_lost_pop_moves_to_the_nearest() -> None:
    answer = what_if(a_snapshot(), [LosePop(pop=AMS)])
    assert any(move.kind == "start" and move.pop != AMS for move in answer.moves)
    before = {city.pop: city for city in answer.now.cities}
    after = {city.pop: city for city in answer.then.cities}
    assert AMS not in after
    asked = sum(city.requests_per_s for city in after.values())
    assert asked == pytest.approx(sum(city.requests_per_s for city in before.values()))
    assert all(city.ttft_p90_ms is not None for city in after.values())
    assert AMS not in {pop.pop for pop in answer.then.pops}


def test_unserved_demand_is_reported_and_more_nodes_help() -> None:
    snapshot = a_snapshot(nodes=NODES[:1], deployments=(a_deployment(replicas_max=50),))
    flood = ScaleDemand(factor=100, pop=AMS)
    alone = what_if(snapshot, [flood])
    (ams,) = [city for city in alone.then.cities if city.pop == AMS]
    assert ams.ttft_p90_ms is None
    assert ams.unserved_per_s > 0
    more = AddNodes(pop=AMS, device_class="cpu", memory_bytes=8 * GIB, nodes=3, devices=2)
    helped = what_if(snapshot, [flood, more])
    (with_nodes,) = [city for city in helped.then.cities if city.pop == AMS]
    assert with_nodes.unserved_per_s < ams.unserved_per_s
    assert {move.node_id for move in helped.moves} & {"new-ams-1", "new-ams-2", "new-ams-3"}


def test_a_new_model_is_placed_and_priced() -> None:
    change = AddDeployment(
        model=a_model("m2"),
        deployment=a_deployment("e", "m2"),
        demand_like=DeploymentId("d"),
        demand_factor=0.5,
    )
    answer = what_if(a_snapshot(), [change], {"cpu": 2.0})
    assert "e" in {move.deployment_id for move in answer.moves}
    (cpu,) = answer.then.devices
    assert cpu.cost_per_hour == 2.0 * cpu.used
    assert set(answer.then.assumed_rates) == {"d", "e"}


def test_a_lost_node_takes_its_replicas_with_it() -> None:
    cluster = apply_change(a_snapshot().cluster, LoseNode(node_id=NodeId("ams-1")))
    assert cluster.placements == ()
    assert NodeId("ams-1") not in {node.node_id for node in cluster.nodes}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (LosePop(pop=PopId("xyz")), "no such PoP"),
        (
            AddNodes(pop=AMS, device_class="h1000", memory_bytes=80 * GIB),
            "add h1000: known classes are .*cpu, h100-80g",
        ),
        (AddNodes(pop=AMS, device_class="h100-80g", memory_bytes=800 * GIB), "it has 79.6 GiB"),
        (LoseNode(node_id=NodeId("nowhere")), "no such node"),
        (ScaleDemand(factor=2, deployment_id=DeploymentId("x")), "no such deployment"),
        (ScaleDemand(factor=2, pop=PopId("xyz")), "no such PoP"),
        (AddDeployment(model=a_model(), deployment=a_deployment()), "with that id"),
        (AddDeployment(model=a_model("m2"), deployment=a_deployment("e")), "the model given is m2"),
        (AddDeployment(deployment=a_deployment("e", "m3")), "the snapshot has no model m3"),
        (
            AddDeployment(
                model=a_model(), deployment=a_deployment("e"), demand_like=DeploymentId("x")
            ),
            "that has none",
        ),
    ],
)
def test_a_change_of_something_unknown_is_refused_with_a_reason(change: Change, words: str) -> None:
    with pytest.raises(InvalidChange, match=f"cannot .*{words}"):
        what_if(a_snapshot(), [change])


def test_near_users_with_free_capacity_are_answered_sooner() -> None:
    def ttft(*placements: Any, requests: float = 1.0) -> float:
        cluster = a_cluster(
            nodes=NODES, placements=placements, demand=(demand_of("ams", requests),)
        )
        (city,) = predict_service(cluster).cities
        assert city.ttft_p90_ms is not None
        return city.ttft_p90_ms

    near, far = a_placement("a", "ams-1"), a_placement("b", "sin-1")
    assert ttft(near) < ttft(far)
    assert ttft(near) < ttft(near, requests=4.0)
    assert ttft(near, a_placement("c", "ams-2"), requests=4.0) < ttft(near, requests=4.0)
    assert ttft(near, far) == ttft(near)


def test_a_prefill_replica_beside_one_whose_device_is_gone_takes_the_requests() -> None:
    """A GPU that is lost is no longer reported, while its replica may still be."""
    deployment = a_deployment(replicas_max=6, roles="auto")
    prefill = a_placement("r1", "ams-1", role=Role.PREFILL)
    lost = a_placement("r2", "ams-2", role=Role.DECODE, device_ids=(DeviceId("gone"),))
    alone, beside = (
        predict_service(a_snapshot(deployments=(deployment,), placements=placements).cluster)
        for placements in ((prefill,), (prefill, lost))
    )
    assert beside.cities == alone.cities
    assert alone.cities[0].unserved_per_s < 2.0


def test_predictions_use_the_rates_that_the_planner_uses() -> None:
    def outcome(device_class: str, *profiles: MeasuredProfile) -> FleetPrediction:
        device = msgspec.structs.replace(a_device(80), device_class=device_class)
        cluster = a_cluster(
            nodes=(a_node("ams-1", "ams", devices=(device,)),),
            placements=(a_placement("a", "ams-1"),),
            demand=(demand_of("ams", 1.0),),
            profiles=profiles,
        )
        return predict_service(cluster)

    def ttft_ms(prediction: FleetPrediction) -> float:
        (city,) = prediction.cities
        assert city.ttft_p90_ms is not None
        return city.ttft_p90_ms

    # Without measurements, rates are estimated from the class as in the planner; assumed on CPUs.
    assert ttft_ms(outcome("h100-80g")) < ttft_ms(outcome("l4-24g")) < ttft_ms(outcome("cpu"))
    slow = MeasuredProfile(
        model_id="m",
        device_class="h100-80g",
        profile=ReplicaProfile(prefill_tokens_per_s=100.0, decode_tokens_per_s=50.0),
    )
    measured = outcome("h100-80g", slow)
    assert ttft_ms(measured) > ttft_ms(outcome("cpu"))
    assert measured.assumed_rates == ()
    # Measurements on one class do not count for the class that it runs on.
    assert outcome("l4-24g", slow).assumed_rates == ("d",)


CHANGES = st.one_of(
    st.builds(LosePop, pop=st.sampled_from([AMS, SIN, IAD])),
    st.builds(
        ScaleDemand,
        factor=st.floats(0, 50),
        pop=st.sampled_from([None, AMS, SIN]),
    ),
    st.builds(
        AddNodes,
        pop=st.sampled_from([AMS, IAD]),
        device_class=st.just("cpu"),
        memory_bytes=st.just(8 * GIB),
        nodes=st.integers(1, 3),
    ),
)


@settings(max_examples=12, deadline=None)
@given(changes=st.lists(CHANGES, max_size=3))
def test_simulations_repeat_and_conserve_demand(
    changes: list[Change],
) -> None:
    snapshot = a_snapshot()

    def asked(cluster: ClusterState) -> float:
        return sum(row.requests_per_s for row in cluster.demand)

    cluster = snapshot.cluster
    for change in changes:
        before, cluster = asked(cluster), apply_change(cluster, change)
        if not isinstance(change, ScaleDemand):
            assert asked(cluster) == pytest.approx(before)
    once, twice = what_if(snapshot, changes), what_if(saved_and_read(snapshot), changes)
    assert msgspec.json.encode(once) == msgspec.json.encode(twice)
    predicted = sum(city.requests_per_s for city in once.then.cities)
    assert predicted == pytest.approx(asked(cluster), abs=1e-4)
