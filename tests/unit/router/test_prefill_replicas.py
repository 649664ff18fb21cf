"""Which prefill replicas a router names: those of the target's PoP and version, idle ones first."""

from typing import Any, Final, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http.headers import PEER_REPLICAS_MAX, ReportedLoad
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import DeploymentEntry, Route, RouteTable
from router.decide.caches.prefix_index import prefix_keys
from router.decide.choice.deployment_routing import DeploymentRouting
from router.decide.choice.peer_replicas import peer_of_ranked, peer_of_route, rounded
from router.decide.choice.prefill_replicas import PrefillReplicas, has_lost_all, without_slots
from router.decide.choice.ranking import RouteQuery, rank
from router.decide.replicas.latency import prompt_token_ms
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.tokens_in_flight import InFlightLedger
from router.feedback import AttemptFeedback
from router.fleet_state import FleetState


def a_route(name: str, role: Role = Role.PREFILL, **fields: Any) -> Route:
    values: dict[str, Any] = {"pop": PopId("ams"), "version": 1, **fields}
    return Route(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("d"),
        node_id=NodeId(f"n-{name}"),
        address=f"{name}:1",
        role=role,
        prefill_tokens_per_s=1000.0,
        **values,
    )


def ranked(route: Route, prefill_ms: float = 4000.0) -> RankedRoute:
    return RankedRoute(
        route,
        "",
        rtt_ms=1.0,
        overhead_ms=0.0,
        queue_ms=0.0,
        prefill_ms=prefill_ms,
        ms_per_token=1.0,
        cached_tokens=0,
        uncached_tokens=4000,
        pending_prefill_tokens=4000,
        queue_tokens_max=0,
    )


def names(replicas: PrefillReplicas, target: RankedRoute, **given: Any) -> list[str]:
    ledger = given.pop("ledger", InFlightLedger(lambda: 0.0))
    found = replicas.candidates(target, 4000, ledger, given.pop("excluded", frozenset()), 0.0)
    return [str(peer.replica_id) for peer in found]


def test_prefill_replicas_take_no_requests_and_are_named_by_pop_and_version() -> None:
    routing = DeploymentRouting()
    target = a_route("d1", Role.DECODE)
    others = [
        a_route("p1"),
        a_route("p2"),
        a_route("far", pop=PopId("sjc")),
        a_route("old", version=2),
    ]
    routing.set_routes([target, *others, a_route("u", Role.UNIFIED)])
    assert set(routing.replicas.slots) == {"d1", "u"}
    replicas = routing.prefill_replicas
    assert names(replicas, ranked(target)) == ["d1", "p1", "p2"]
    assert names(replicas, ranked(target), excluded={ReplicaId("p1")}) == ["d1", "p2"]
    assert names(replicas, ranked(target, 2.0)) == []
    assert names(replicas, ranked(a_route("d2", Role.DECODE, pop=PopId("lhr")))) == []
    ledger = InFlightLedger(lambda: 0.0)
    ledger.reserve(ReplicaId("p1"), prefill=100, decode=0)
    assert names(replicas, ranked(target), ledger=ledger) == ["d1", "p2", "p1"]
    routing.set_routes([target])
    assert not routing.prefill_replicas
    assert names(routing.prefill_replicas, ranked(target)) == []


def test_only_a_few_are_named() -> None:
    replicas = PrefillReplicas()
    alone = [a_route(f"p{n}") for n in range(9)]
    assert replicas.split([*alone, a_route("d", Role.DECODE)]) == [a_route("d", Role.DECODE)]
    assert len(names(replicas, ranked(a_route("d", Role.DECODE)))) == 4


def test_prefill_replicas_without_any_other_take_requests() -> None:
    replicas, alone = PrefillReplicas(), [a_route("p1"), a_route("p2")]
    assert replicas.split(alone) == alone
    assert not replicas


def test_a_prompt_waits_for_the_first_prefill_replica_to_be_free() -> None:
    replicas, ledger = PrefillReplicas(), InFlightLedger(lambda: 0.0)
    target = a_route("d1", Role.DECODE)
    replicas.split([target, a_route("p1"), a_route("p2"), a_route("old", version=2)])
    assert replicas.wait_ms(target, ledger, 0.0) == 0
    ledger.reserve(ReplicaId("p1"), prefill=500, decode=0)
    assert replicas.wait_ms(target, ledger, 0.0) == 0
    ledger.reserve(ReplicaId("p2"), prefill=800, decode=0)
    assert replicas.wait_ms(target, ledger, 0.0) == 500
    elsewhere = a_route("d2", Role.DECODE, pop=PopId("lhr"))
    assert replicas.wait_ms(elsewhere, ledger, 0.0) == 0


def test_a_pop_whose_prefill_replicas_are_busy_is_ranked_behind() -> None:
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    near, far = a_route("near", Role.DECODE), a_route("far", Role.DECODE, pop=PopId("sjc"))
    reader = a_route("p1")
    entry = DeploymentEntry(
        deployment_id=DeploymentId("d"), name="d", model_id=ModelId("m"), context_tokens=8192
    )
    table = RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        deployments=(entry,),
        routes=(far, near, reader),
    )
    fleet.adopt(table)
    query = RouteQuery("r", 1000, 100)
    for route in (near, far):
        fleet.in_flight.reserve(route.replica_id, prefill=0, decode=50)
    before = rank(fleet.snapshot(near.deployment_id, fleet.clock()), query)
    waits = {str(route.route.replica_id): route.queue_ms for route in before}
    assert waits["near"] == waits["far"]
    fleet.in_flight.reserve(reader.replica_id, prefill=5000, decode=0)
    fleet.note_change(near.replica_id)
    after = rank(fleet.snapshot(near.deployment_id, fleet.clock()), query)
    assert after[0].route.replica_id == "far"
    waits = {str(route.route.replica_id): route.queue_ms for route in after}
    assert waits["near"] - waits["far"] == pytest.approx(5000)


def test_prefill_replicas_answer_only_while_every_other_one_is_lost() -> None:
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    routes = (a_route("d1", Role.DECODE), a_route("p1"))
    entry = DeploymentEntry(
        deployment_id=DeploymentId("d"), name="d", model_id=ModelId("m"), context_tokens=8192
    )
    table = RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        deployments=(entry,),
        routes=routes,
    )
    fleet.adopt(table)
    query, snapshot = RouteQuery("r", 1000, 100), fleet.snapshot(DeploymentId("d"), fleet.clock())
    assert not has_lost_all(rank(snapshot, query), snapshot)
    assert has_lost_all(rank(snapshot, query, {ReplicaId("d1")}), snapshot)
    for _ in range(20):
        fleet.health.record_failure(ReplicaId("d1"), 1.0, [ReplicaId("d1")])
    snapshot = fleet.snapshot(DeploymentId("d"), fleet.clock())
    # It is ranked as the last resort.
    assert rank(snapshot, query)[0].route.replica_id == "d1"
    assert has_lost_all(rank(snapshot, query), snapshot)
    instead = rank(fleet.prefill_snapshot(DeploymentId("d")), without_slots(query))
    assert [route.route.replica_id for route in instead] == ["p1"]
    # The one that answers also reads the prompt.
    readers = fleet.routing(DeploymentId("d")).prefill_replicas
    assert names(readers, instead[0]) == []


def a_prefill_pair() -> FleetState:
    """Return a PoP with a decode replica and two that read prompts, 1000 tokens/s each."""
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    routes = (a_route("d1", Role.DECODE), a_route("p1"), a_route("p2"))
    entry = DeploymentEntry(
        deployment_id=DeploymentId("d"), name="d", model_id=ModelId("m"), context_tokens=8192
    )
    fleet.adopt(
        RouteTable(
            cluster_id=ClusterId("c"),
            generation=Generation(1),
            epoch=Epoch(1),
            deployments=(entry,),
            routes=routes,
        )
    )
    return fleet


def reading_ms(fleet: FleetState, prompt: bytes) -> dict[str, int]:
    """Return how long each prefill replica is told to take for a prompt, the first one first."""
    peers = fleet.routing(DeploymentId("d")).prefill_replicas.candidates(
        ranked(a_route("d1", Role.DECODE)),
        1000,
        fleet.in_flight,
        frozenset(),
        1.0,
        keys=prefix_keys(prompt, 1),
    )
    return {str(peer.replica_id): peer.prefill_ms for peer in peers[1:]}


def test_the_prefill_replica_that_has_the_prefix_comes_first_unless_its_queue_is_longer() -> None:
    fleet = a_prefill_pair()
    feedback, deployment_id = AttemptFeedback(fleet), DeploymentId("d")
    prompt = b"a" * 4096
    keys = prefix_keys(prompt, 1)
    assert reading_ms(fleet, prompt) == {"p1": 1000, "p2": 1000}
    reading = feedback.begin_prefill(deployment_id, ReplicaId("p2"), 1000, keys)
    assert reading is not None
    assert fleet.in_flight.load_of(ReplicaId("p2")).prefill_tokens == 1000
    reading.reservation.release()
    feedback.learn_prefill(deployment_id, reading, 1000, 0, keys)
    # The next turn of the conversation: half of it is cached, and only the rest is counted.
    longer = prompt + b"b" * 4096
    assert list(reading_ms(fleet, longer).items()) == [("p2", 500), ("p1", 1000)]
    second = feedback.begin_prefill(deployment_id, ReplicaId("p2"), 1000, prefix_keys(longer, 1))
    assert second is not None
    assert fleet.in_flight.load_of(ReplicaId("p2")).prefill_tokens == 500
    waiting = fleet.in_flight.reserve(ReplicaId("p2"), prefill=600, decode=0)
    assert list(reading_ms(fleet, longer)) == ["p1", "p2"]
    waiting.release()
    # It did not read the second half after all.
    feedback.undo_prefill(deployment_id, second, prefix_keys(longer, 1))
    assert list(reading_ms(fleet, longer).items()) == [("p2", 500), ("p1", 1000)]


def test_what_a_prefill_replica_has_evicted_no_longer_counts() -> None:
    fleet = a_prefill_pair()
    feedback, prompt = AttemptFeedback(fleet), b"a" * 4096
    keys = prefix_keys(prompt, 1)
    reading = feedback.begin_prefill(DeploymentId("d"), ReplicaId("p2"), 1000, keys)
    assert reading is not None
    feedback.learn_prefill(DeploymentId("d"), reading, 1000, 0, keys)
    reading.reservation.release()
    assert list(reading_ms(fleet, prompt)) == ["p2", "p1"]
    load = ReportedLoad(0, 0, 0, 0, cache_age_ms=1000)
    fleet.record_load(a_route("p2"), load, 3.0)
    assert reading_ms(fleet, prompt) == {"p1": 1000, "p2": 1000}
    assert feedback.begin_prefill(DeploymentId("d"), ReplicaId("gone"), 1000, keys) is None


def test_prompts_read_by_prefill_replicas_are_shared_between_the_processes_of_a_router() -> None:
    here, other = a_prefill_pair(), a_prefill_pair()
    here.prompt_outbox.is_open = True
    feedback, prompt = AttemptFeedback(here), b"a" * 4096
    keys = prefix_keys(prompt, 1)
    reading = feedback.begin_prefill(DeploymentId("d"), ReplicaId("p2"), 1000, keys)
    assert reading is not None
    feedback.learn_prefill(DeploymentId("d"), reading, 1000, 0, keys)
    other.learn_prompts(here.prompt_outbox.take())
    assert list(reading_ms(other, prompt)) == ["p2", "p1"]


class DrawnReplica(NamedTuple):
    """A prefill replica: where it is, what it has cached and what waits there."""

    pop: str
    version: int
    tokens_per_s: float
    cached_tokens: int
    waiting_tokens: int
    others_tokens: int
    is_excluded: bool


REPLICAS: Final = st.lists(
    st.builds(
        DrawnReplica,
        pop=st.sampled_from(["ams", "ams", "ams", "sjc"]),
        version=st.sampled_from([1, 1, 1, 2]),
        tokens_per_s=st.sampled_from([0.0, 900.0, 1000.0, 30_000.0]),
        cached_tokens=st.sampled_from([0, 0, 16, 100]),
        waiting_tokens=st.sampled_from([0, 0, 1, 700, 90_000]),
        others_tokens=st.sampled_from([0, 0, 300]),
        is_excluded=st.sampled_from([False, False, False, True]),
    ),
    max_size=8,
)


@given(
    REPLICAS, st.sampled_from([1, 1000, 40_000]), st.sampled_from([2.0, 5.0, 400.0]), st.booleans()
)
def test_the_candidates_are_those_that_would_have_read_the_prompt_first(
    drawn: list[DrawnReplica], prompt_tokens: int, prefill_ms: float, needs_prefill: bool
) -> None:
    target, replicas = a_route("d1", Role.DECODE), PrefillReplicas()
    ledger, now_s = InFlightLedger(lambda: 10.0), 12.5
    prompt = b"x" * 20_000
    routes, shares = [], {}
    for number, one in enumerate(drawn):
        route = a_route(f"p{number}", pop=PopId(one.pop), version=one.version)
        routes.append(msgspec.structs.replace(route, prefill_tokens_per_s=one.tokens_per_s))
    assert list(replicas.split([target, *routes])) == [target]
    for route, one in zip(routes, drawn, strict=True):
        sent = prefix_keys(prompt[: 128 * one.cached_tokens], 1)
        replicas.record_sent(route.replica_id, sent, now_s)
        ledger.reserve(route.replica_id, prefill=one.waiting_tokens, decode=7)
        ledger.record_other_routers(route.replica_id, one.others_tokens, 9, 10.0)
        shares[route.replica_id] = sent.ends[-1] / len(prompt) if sent.ends else 0.0
    excluded = {
        route.replica_id for route, one in zip(routes, drawn, strict=True) if one.is_excluded
    }
    found = replicas.candidates(
        *(ranked(target, prefill_ms), prompt_tokens, ledger, excluded, now_s),
        *(needs_prefill, prefix_keys(prompt, 1)),
    )
    if prefill_ms < 5.0 and not needs_prefill:
        assert found == []
        return
    peers = []
    for route in routes:
        if route.pop != "ams" or route.version != 1 or route.replica_id in excluded:
            continue
        token_ms = prompt_token_ms(route.prefill_tokens_per_s)
        there = ledger.tokens_at(route.replica_id, now_s)
        uncached = max(1, round(prompt_tokens * (1 - shares[route.replica_id])))
        waiting = there.prefill_tokens + there.others_prefill_tokens
        peers.append(((waiting + uncached) * token_ms, peer_of_route(route, uncached, token_ms)))
    peers.sort(key=lambda peer: peer[0])
    readers = [peer for _, peer in peers[: PEER_REPLICAS_MAX - 1]]
    assert found == ([peer_of_ranked(ranked(target, prefill_ms)), *readers] if readers else [])
    waits = [
        (there.prefill_tokens + there.others_prefill_tokens)
        * prompt_token_ms(route.prefill_tokens_per_s)
        for route in routes
        if (there := ledger.tokens_at(route.replica_id, now_s))
        and (route.pop, route.version) == ("ams", 1)
    ]
    assert replicas.wait_ms(target, ledger, now_s) == min(waits, default=0.0)


@given(st.one_of(st.floats(0, 1e12), st.integers(0, 10**6).map(lambda n: n / 2)))
def test_numbers_are_rounded_as_by_round(value: float) -> None:
    assert rounded(value) == round(value)
