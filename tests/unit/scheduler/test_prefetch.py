"""Weights fetched before the peak: where, how fast, and when the wish is over."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.artifact import manifest_digest
from isochrone.wire.ids import DeploymentId, NodeId, PopId
from isochrone.wire.model import Artifact, ArtifactFile, Model
from scheduler.decide.cluster import ClusterState, DemandRate, PrefetchTarget
from scheduler.decide.placement.planner import plan_deployments
from scheduler.decide.placement.prefetch import (
    KEPT_FOR_S,
    LINK_SHARE,
    PrefetchDecision,
    plan_prefetch,
)
from scheduler.decide.whatif.explain import explain_placement
from tests.builders import GIB, a_cluster, a_deployment, a_model, a_node, a_placement

DUE_S = 10_000.0
LINK = 100e6


def a_large_model(name: str = "m", gib: float = 20.0) -> Model:
    file = ArtifactFile(
        path="m.gguf", size_bytes=int(gib * GIB), sha256=name[0].encode().hex() * 32
    )
    artifact = Artifact(source="https://origin/m/", files=(file,), digest=manifest_digest([file]))
    return msgspec.structs.replace(a_model(name, gib), artifact=artifact)


MODEL = a_large_model()
DIGEST = MODEL.artifact.digest


def asked(pop: str, requests: float = 2.0, deployment: str = "d") -> DemandRate:
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


def a_picture(*nodes: Any, **fields: Any) -> ClusterState:
    """Amsterdam holds the model and has it warm; Singapore is foretold to ask for it."""
    defaults: dict[str, Any] = {
        "models": (MODEL,),
        "deployments": (a_deployment(replicas_min=1, replicas_max=4),),
        "nodes": (server("ams-1", "ams", artifacts=(DIGEST,)), *nodes),
        "placements": (a_placement("r1", "ams-1", memory_bytes=21 * GIB),),
        "demand": (asked("ams"), asked("sin")),
    }
    return a_cluster(**{**defaults, **fields})


def a_wish(node: str = "sin-1", **fields: Any) -> PrefetchTarget:
    defaults: dict[str, Any] = {"due_s": 5000.0, "bytes_per_s": 5e6, "reason": "foretold"}
    return PrefetchTarget(
        node_id=NodeId(node),
        model_id="m",
        deployment_id=DeploymentId("d"),
        **{**defaults, **fields},
    )


def test_a_city_foretold_to_ask_has_the_weights_fetched_in_half_of_the_time() -> None:
    foreseen = plan_prefetch(a_picture(server("sin-1", "sin")), DUE_S)
    (wish,) = foreseen.new
    assert (wish.node_id, wish.model_id, wish.due_s) == ("sin-1", "m", DUE_S)
    assert wish.bytes_per_s == pytest.approx(MODEL.artifact.size_bytes / (DUE_S / 2))
    assert "foretold for 2.8 h from now: demand: saves" in wish.reason


def test_what_is_wished_is_not_wished_again_and_what_came_is_noted_once() -> None:
    picture = a_picture(server("sin-1", "sin"), prefetches=(a_wish(),))
    assert plan_prefetch(picture, DUE_S) == PrefetchDecision()
    came = server("sin-1", "sin", artifacts=(DIGEST,))
    (arrived,) = plan_prefetch(a_picture(came, prefetches=(a_wish(),)), DUE_S).arrived
    assert arrived == a_wish()
    noted = a_picture(came, prefetches=(a_wish(is_held=True),))
    assert plan_prefetch(noted, DUE_S) == PrefetchDecision()


def test_one_node_of_a_city_fetches_from_afar_and_the_next_has_it_from_that_one() -> None:
    pair = {"demand": (asked("ams"), asked("sin", 9.0))}
    picture = a_picture(server("sin-1", "sin"), server("sin-2", "sin"), **pair)
    (first,) = plan_prefetch(picture, DUE_S).new
    assert first.bytes_per_s > 0
    there = msgspec.structs.replace(
        picture,
        nodes=tuple(
            msgspec.structs.replace(node, artifacts=(DIGEST,))
            if node.node_id == first.node_id
            else node
            for node in picture.nodes
        ),
        prefetches=(first,),
    )
    (second,) = plan_prefetch(there, DUE_S).new
    assert second.node_id != first.node_id
    assert second.bytes_per_s == 0, "within a city nothing holds it back"


def test_a_start_where_the_weights_came_is_from_disk_and_is_where_the_planner_goes() -> None:
    nodes = (server("sin-1", "sin"), server("sin-2", "sin", artifacts=(DIGEST,)))
    (start,) = plan_deployments(a_picture(*nodes)).starts
    assert start.node_id == "sin-2"
    answer = explain_placement(a_picture(*nodes, prefetches=(a_wish("sin-2"),)), DeploymentId("d"))
    assert answer is not None
    assert answer.prefetches == ("sin-2 has its weights on disk, for 1.4 h from now: foretold",)


@pytest.mark.parametrize(
    ("node", "fields", "reason"),
    [
        ({"draining": True}, {}, "draining"),
        ({"revoked": True}, {}, "revoked"),
        ({}, {"deployments": (), "placements": ()}, "no deployment serves"),
        ({}, {"models": (), "deployments": (), "placements": ()}, "the model is gone"),
        ({}, {"placements": (a_placement("r2", "sin-1"),)}, "has its seat there"),
        ({"disk_free_bytes": 10 * GIB}, {}, "too few for it"),
        ({}, {"prefetches": (a_wish(due_s=-KEPT_FOR_S - 1),)}, "did not come in time"),
        (
            {"artifacts": (DIGEST,)},
            {"prefetches": (a_wish(due_s=-KEPT_FOR_S - 1),)},
            "its time has passed",
        ),
    ],
)
def test_a_wish_is_over_when_it_makes_no_sense(
    node: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    picture = a_picture(server("sin-1", "sin", **node), **{"prefetches": (a_wish(),), **fields})
    (over,) = plan_prefetch(picture, -1.0).ended
    assert reason in over.reason


def test_a_wavering_forecast_takes_nothing_back() -> None:
    quiet = a_picture(server("sin-1", "sin"), demand=(asked("ams"),), prefetches=(a_wish(),))
    assert plan_prefetch(quiet, DUE_S) == PrefetchDecision()


def test_what_is_too_large_for_the_time_left_is_begun_with_all_that_prefetching_may_take() -> None:
    (wish,) = plan_prefetch(a_picture(server("sin-1", "sin")), 60.0).new
    assert wish.bytes_per_s == pytest.approx(LINK_SHARE * LINK)


def test_two_models_of_one_city_share_its_link() -> None:
    other = a_large_model("n")
    picture = a_picture(
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
        demand=(asked("sin"), asked("sin", deployment="e")),
    )
    assert len(plan_prefetch(picture, DUE_S).new) == 2
    # Hardly time for one of them: the second waits until the link is free.
    (alone,) = plan_prefetch(picture, 500.0).new
    assert alone.bytes_per_s == pytest.approx(LINK_SHARE * LINK)


@st.composite
def pictures(draw: st.DrawFn) -> ClusterState:
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
            asked(pop, draw(st.floats(0.1, 20.0)), name) for pop in ("ams", "sin") for name in "de"
        ),
    )


@settings(max_examples=20, deadline=None)
@given(pictures(), st.floats(30.0, 20_000.0))
def test_wishes_keep_residency_disks_and_links_and_come_to_rest(
    picture: ClusterState, due_s: float
) -> None:
    nodes = {node.node_id: node for node in picture.nodes}
    models = {model.model_id: model for model in picture.models}
    for _ in range(len(nodes) * len(models) + 1):
        foreseen = plan_prefetch(picture, due_s)
        assert not foreseen.ended, "nothing has changed but what was wished"
        if not foreseen.new:
            break
        wishes = (*picture.prefetches, *foreseen.new)
        picture = msgspec.structs.replace(picture, prefetches=wishes)
    else:
        raise AssertionError("wishes without end")
    taken: dict[str, float] = {}
    pending: dict[str, int] = {}
    for wish in picture.prefetches:
        node, model = nodes[wish.node_id], models[wish.model_id]
        assert not node.draining
        assert model.artifact.digest not in node.artifacts
        assert not (
            node.pop == "sin" and wish.model_id == "m" and picture.deployments[0].policy.deny
        )
        taken[node.pop] = taken.get(node.pop, 0.0) + wish.bytes_per_s
        pending[wish.node_id] = pending.get(wish.node_id, 0) + model.artifact.size_bytes
    for node_id, size in pending.items():
        assert size < nodes[NodeId(node_id)].disk_free_bytes
    for rate in taken.values():
        # No way is faster than the fastest between clouds.
        assert rate <= LINK_SHARE * 1.2e9 * 1.001
    pairs = [(wish.node_id, wish.model_id) for wish in picture.prefetches]
    assert len(set(pairs)) == len(pairs)
