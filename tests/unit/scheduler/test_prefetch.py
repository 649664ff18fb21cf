"""Weights are prefetched before a peak: where, how fast, and until when."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile, CatalogModel
from scheduler.decide.cluster import ClusterState, DemandRate, PrefetchTarget
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.placement.prefetch import (
    KEPT_FOR_S,
    LINK_SHARE,
    PrefetchDecision,
    plan_prefetch,
)
from scheduler.decide.whatif import explain_placement
from tests.builders import GIB, a_cluster, a_deployment, a_model, a_node, a_placement

DUE_S = 10_000.0
LINK = 100e6


def a_large_model(name: str = "m", gib: float = 20.0) -> CatalogModel:
    file = ArtifactFile(
        path="m.gguf", size_bytes=int(gib * GIB), sha256=name[0].encode().hex() * 32
    )
    artifact = Artifact(source="https://origin/m/", files=(file,), digest=manifest_digest([file]))
    return msgspec.structs.replace(a_model(name, gib), artifact=artifact)


MODEL = a_large_model()
DIGEST = MODEL.artifact.digest


def demand_of(pop: str, requests: float = 2.0, deployment: str = "d") -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId(deployment),
        pop=PopId(pop),
        requests_per_s=requests,
        uncached_tokens_per_s=50.0 * requests,
        output_tokens_per_s=4.0 * requests,
    )


def server(name: str, pop: str, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"disk_free_bytes": 400 * GIB, "fetch_bytes_per_s": LINK}
    return a_node(name, pop, gib=32.0, **{**defaults, **fields})


def a_state(*nodes: Any, **fields: Any) -> ClusterState:
    """Amsterdam has the model warm; demand from Singapore is forecast."""
    defaults: dict[str, Any] = {
        "models": (MODEL,),
        "deployments": (a_deployment(replicas_min=1, replicas_max=4),),
        "nodes": (server("ams-1", "ams", artifacts=(DIGEST,)), *nodes),
        "placements": (a_placement("r1", "ams-1", memory_bytes=21 * GIB),),
        "demand": (demand_of("ams"), demand_of("sin")),
    }
    return a_cluster(**{**defaults, **fields})


def a_target(node: str = "sin-1", **fields: Any) -> PrefetchTarget:
    defaults: dict[str, Any] = {"due_s": 5000.0, "bytes_per_s": 5e6, "reason": "foretold"}
    return PrefetchTarget(
        node_id=NodeId(node),
        model_id="m",
        deployment_id=DeploymentId("d"),
        **{**defaults, **fields},
    )


def test_weights_are_fetched_in_half_of_the_time_before_forecast_demand() -> None:
    decision = plan_prefetch(a_state(server("sin-1", "sin")), DUE_S)
    (target,) = decision.new
    assert (target.node_id, target.model_id, target.due_s) == ("sin-1", "m", DUE_S)
    assert target.bytes_per_s == pytest.approx(MODEL.artifact.size_bytes / (DUE_S / 2))
    assert "forecast for 2.8 h from now: demand: saves" in target.reason


def test_a_target_is_not_added_twice_and_its_arrival_is_noted_once() -> None:
    state = a_state(server("sin-1", "sin"), prefetches=(a_target(),))
    assert plan_prefetch(state, DUE_S) == PrefetchDecision()
    arrived_node = server("sin-1", "sin", artifacts=(DIGEST,))
    (arrived,) = plan_prefetch(a_state(arrived_node, prefetches=(a_target(),)), DUE_S).arrived
    assert arrived == a_target()
    noted = a_state(arrived_node, prefetches=(a_target(is_held=True),))
    assert plan_prefetch(noted, DUE_S) == PrefetchDecision()


def test_one_node_of_a_pop_fetches_from_another_pop_and_the_next_copies_it() -> None:
    pair = {"demand": (demand_of("ams"), demand_of("sin", 9.0))}
    state = a_state(server("sin-1", "sin"), server("sin-2", "sin"), **pair)
    (first,) = plan_prefetch(state, DUE_S).new
    assert first.bytes_per_s > 0
    there = msgspec.structs.replace(
        state,
        nodes=tuple(
            msgspec.structs.replace(node, artifacts=(DIGEST,))
            if node.node_id == first.node_id
            else node
            for node in state.nodes
        ),
        prefetches=(first,),
    )
    (second,) = plan_prefetch(there, DUE_S).new
    assert second.node_id != first.node_id
    assert second.bytes_per_s == 0, "within a city nothing holds it back"


def test_a_replica_starts_from_disk_where_weights_were_prefetched() -> None:
    nodes = (server("sin-1", "sin"), server("sin-2", "sin", artifacts=(DIGEST,)))
    (start,) = plan_deployments(a_state(*nodes)).starts
    assert start.node_id == "sin-2"
    answer = explain_placement(a_state(*nodes, prefetches=(a_target("sin-2"),)), DeploymentId("d"))
    assert answer is not None
    assert answer.prefetches == ("sin-2 has its weights on disk, for 1.4 h from now: foretold",)


@pytest.mark.parametrize(
    ("node", "fields", "reason"),
    [
        ({"draining": True}, {}, "draining"),
        ({"revoked": True}, {}, "revoked"),
        ({}, {"deployments": (), "placements": ()}, "no deployment serves"),
        ({}, {"models": (), "deployments": (), "placements": ()}, "the model is gone"),
        ({}, {"placements": (a_placement("r2", "sin-1"),)}, "a replica was placed there"),
        ({"disk_free_bytes": 10 * GIB}, {}, "too few for it"),
        ({}, {"prefetches": (a_target(due_s=-KEPT_FOR_S - 1),)}, "did not arrive in time"),
        (
            {"artifacts": (DIGEST,)},
            {"prefetches": (a_target(due_s=-KEPT_FOR_S - 1),)},
            "its time has passed",
        ),
    ],
)
def test_a_target_ends_when_it_makes_no_sense(
    node: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    state = a_state(server("sin-1", "sin", **node), **{"prefetches": (a_target(),), **fields})
    (over,) = plan_prefetch(state, -1.0).ended
    assert reason in over.reason


def test_a_fluctuating_forecast_revokes_no_target() -> None:
    quiet = a_state(server("sin-1", "sin"), demand=(demand_of("ams"),), prefetches=(a_target(),))
    assert plan_prefetch(quiet, DUE_S) == PrefetchDecision()


def test_an_artifact_too_large_for_the_time_left_uses_the_full_share_of_the_link() -> None:
    (target,) = plan_prefetch(a_state(server("sin-1", "sin")), 60.0).new
    assert target.bytes_per_s == pytest.approx(LINK_SHARE * LINK)


def test_two_models_of_one_pop_share_its_link() -> None:
    other = a_large_model("n")
    state = a_state(
        server("sin-1", "sin"),
        server("sin-2", "sin"),
        models=(MODEL, other),
        deployments=(a_deployment(replicas_max=4), a_deployment("e", "n", replicas_max=4)),
        nodes=(
            server("ams-1", "ams", artifacts=(DIGEST, other.artifact.digest)),
            server("ams-2", "ams"),
            server("sin-1", "sin"),
            server("sin-2", "sin"),
        ),
        placements=(
            a_placement("r1", "ams-1", memory_bytes=21 * GIB),
            a_placement("r2", "ams-2", "e", memory_bytes=21 * GIB),
        ),
        demand=(demand_of("sin"), demand_of("sin", deployment="e")),
    )
    assert len(plan_prefetch(state, DUE_S).new) == 2
    # There is hardly time for one model: the second waits until the link is free.
    (alone,) = plan_prefetch(state, 500.0).new
    assert alone.bytes_per_s == pytest.approx(LINK_SHARE * LINK)


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    models = tuple(a_large_model(name, draw(st.sampled_from([2.0, 20.0]))) for name in "mn")
    digests = [model.artifact.digest for model in models]
    nodes = [
        server(
            f"{pop}-{number}",
            pop,
            artifacts=tuple(sorted(draw(st.sets(st.sampled_from(digests), max_size=1)))),
            disk_free_bytes=draw(st.sampled_from([5, 30, 400])) * GIB,
            fetch_bytes_per_s=draw(st.sampled_from([0.0, 1e6, LINK])),
            draining=draw(st.booleans()),
        )
        for pop in draw(st.sets(st.sampled_from(["ams", "sin", "gru"]), min_size=1))
        for number in range(draw(st.integers(1, 3)))
    ]
    return a_cluster(
        models=models,
        deployments=(
            a_deployment(
                replicas_min=0, replicas_max=6, deny=draw(st.sampled_from([(), ("sin",)]))
            ),
            a_deployment("e", "n", replicas_min=1, replicas_max=6),
        ),
        nodes=tuple(nodes),
        demand=tuple(
            demand_of(pop, draw(st.floats(0.1, 20.0)), name)
            for pop in ("ams", "sin")
            for name in "de"
        ),
    )


@settings(max_examples=20, deadline=None)
@given(states(), st.floats(30.0, 20_000.0))
def test_targets_respect_residency_disks_and_links_and_become_stable(
    state: ClusterState, due_s: float
) -> None:
    nodes = {node.node_id: node for node in state.nodes}
    models = {model.model_id: model for model in state.models}
    for _ in range(len(nodes) * len(models) + 1):
        decision = plan_prefetch(state, due_s)
        assert not decision.ended, "nothing has changed but the prefetches"
        if not decision.new:
            break
        prefetches = (*state.prefetches, *decision.new)
        state = msgspec.structs.replace(state, prefetches=prefetches)
    else:
        raise AssertionError("prefetches without end")
    taken: dict[str, float] = {}
    pending: dict[str, int] = {}
    for target in state.prefetches:
        node, model = nodes[target.node_id], models[target.model_id]
        assert not node.draining
        assert model.artifact.digest not in node.artifacts
        assert not (
            node.pop == "sin" and target.model_id == "m" and state.deployments[0].policy.deny
        )
        taken[node.pop] = taken.get(node.pop, 0.0) + target.bytes_per_s
        pending[target.node_id] = pending.get(target.node_id, 0) + model.artifact.size_bytes
    for node_id, size in pending.items():
        assert size < nodes[NodeId(node_id)].disk_free_bytes
    for rate in taken.values():
        # No way is faster than the fastest between clouds.
        assert rate <= LINK_SHARE * 1.2e9 * 1.001
    pairs = [(target.node_id, target.model_id) for target in state.prefetches]
    assert len(set(pairs)) == len(pairs)
