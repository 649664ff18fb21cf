"""Which prefill replicas a router names: those of the target's PoP and version, idle ones first."""

from typing import Any

from isochrone.wire.assignment import Role
from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import Route
from router.decide.deployment_routing import DeploymentRouting
from router.decide.prefill_replicas import PrefillReplicas
from router.decide.ranked_route import RankedRoute
from router.decide.tokens_in_flight import InFlightLedger


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
    ledger = given.pop("ledger", InFlightLedger())
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
    ledger = InFlightLedger()
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
