"""Searching for a replica decides as a scan of all does, whatever the replicas look like."""

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import Route
from router.decide.affinity import SessionBinding
from router.decide.prefix_index import NO_MATCHES, PrefixMatch, PrefixMatches
from router.decide.ranking import RankedRoutes, RouteQuery, rank_by_costs
from router.decide.replica_table import ReplicaTable, RoutingSnapshot
from router.decide.slot_costs import (
    FEW_HOLDERS_MAX,
    ScannedCosts,
    SearchedCosts,
    searched_costs,
)
from router.decide.tokens_in_flight import InFlightLedger

NOW_S = 1000.0
POPS = 12


class Fleet(NamedTuple):
    """A table whose replicas have had some load, and the names of them."""

    table: ReplicaTable
    replicas: list[ReplicaId]
    now_s: float


def a_fleet(chance: random.Random, replicas: int) -> Fleet:
    """Make replicas in POPS PoPs, some of which left, came, were loaded and are idle again."""
    pops = [chance.randrange(POPS) for _ in range(replicas)]
    far_ms = [chance.choice((0.0, 5.0, 30.0, 200.0)) + chance.random() for _ in range(POPS)]
    routes = [
        Route(
            replica_id=ReplicaId(f"r{n}"),
            deployment_id=DeploymentId("d"),
            version=1,
            node_id=NodeId(f"n{n}"),
            pop=PopId(f"p{pop}"),
            address="x:1",
            tokens_in_flight_max=chance.choice((300, 5000, 10**6)),
            prefill_tokens_per_s=chance.choice((1000.0, 1000.0, 5300.0)),
        )
        for n, pop in enumerate(pops)
    ]
    table, ledger, now_s = ReplicaTable(), InFlightLedger(), NOW_S
    table.set_routes(routes)
    for turn in range(4):
        if turn == 2:
            # Some slots become free, and new replicas take a part of them.
            left = [route for route in routes if chance.random() < 0.9] or routes
            table.set_routes(left)
            routes = left
        for route, pop in zip(routes, pops, strict=False):
            slot = table.slots[route.replica_id]
            if chance.random() < 0.4:
                ledger.reserve(
                    route.replica_id,
                    prefill=chance.choice((0, 50, 4000)),
                    decode=chance.choice((0, 200)),
                    work_ms=chance.choice((0.0, 30.0, 900.0)),
                    arrives_s=now_s,
                )
            if turn == 0 or chance.random() < 0.6:
                # Equal round trips make equal costs.
                rtt_ms = far_ms[pop] + chance.choice((0.0, 0.0, 1.0))
                table.refresh(slot, rtt_ms, ledger.load_of(route.replica_id), now_s)
        RoutingSnapshot(table, now_s, {}, {})
        now_s += chance.choice((0.001, 0.2, 3.0))
    table.queued_share = chance.choice((0.0, 0.5))
    table.spilled_at_ms = chance.choice((0.0, 1000 * now_s))
    return Fleet(table, [route.replica_id for route in routes], now_s)


def some_matches(chance: random.Random, fleet: Fleet) -> PrefixMatches:
    """Let some slots hold more of a prompt than the others."""
    slots = list(fleet.table.slots.values())
    chance.shuffle(slots)
    shares = sorted(chance.random() for _ in range(chance.randrange(4)))
    longer, all_share = [], chance.choice((0.0, 0.1))
    for share in shares:
        count = chance.choice((1, 3, len(slots) // 3))
        mask = sum(1 << slot for slot in slots[:count])
        del slots[:count]
        if mask:
            longer.append(PrefixMatch(mask, all_share + (1 - all_share) * share))
    return PrefixMatches(all_share, longer) if longer or all_share else NO_MATCHES


def a_query(chance: random.Random, fleet: Fleet) -> RouteQuery:
    bound = chance.choice([*fleet.replicas, ReplicaId("gone")])
    return RouteQuery(
        f"q{chance.random()}",
        chance.choice((4, 100, 6000)),
        100,
        chance.choice(("", "acme/session")),
        SessionBinding(bound, chance.choice((0, 80, 5000)), 0.0) if chance.random() < 0.5 else None,
        some_matches(chance, fleet),
    )


def some(
    chance: random.Random, replicas: list[ReplicaId], shares: tuple[float, ...]
) -> list[ReplicaId]:
    """Draw about one of the shares of the replicas."""
    share = chance.choice(shares)
    return [replica_id for replica_id in replicas if chance.random() < share]


def described(routes: RankedRoutes) -> list[object]:
    """Return all that ranking decides, to the last digit."""
    first = [route_facts(routes, 0)] if routes else []
    peers = [peer.route.replica_id for peer in routes.peers_of_first(4)] if routes else []
    order = [route.route.replica_id for route in routes]
    return [first, peers, order, len(routes), routes.full_count]


def route_facts(routes: RankedRoutes, rank: int) -> tuple[str, str, str]:
    first = routes[rank]
    return first.route.replica_id, first.reason_header, str(first.queue_tokens_max)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from((1, 3, 40, 160, FEW_HOLDERS_MAX * 4)))
def test_a_search_decides_as_a_scan_does(seed: int, replicas: int) -> None:
    chance = random.Random(seed)
    fleet = a_fleet(chance, replicas)
    ejected = dict.fromkeys(some(chance, fleet.replicas, (0, 0.1, 0.9)), fleet.now_s + 1)
    starting = dict.fromkeys(some(chance, fleet.replicas, (0, 0.2, 1)), 0.3)
    snapshot = RoutingSnapshot(fleet.table, fleet.now_s, ejected, starting)
    excluded = set(fleet.replicas[: chance.choice((0, 0, 2, replicas))])
    for _ in range(3):
        query = a_query(chance, fleet)
        by_scan = rank_by_costs(snapshot, query, ScannedCosts(snapshot, query, excluded))
        by_search = rank_by_costs(snapshot, query, searched_costs(snapshot, query, excluded))
        assert described(by_search) == described(by_scan)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_cost_of_a_slot_is_the_same_however_it_is_found(seed: int) -> None:
    chance = random.Random(seed)
    fleet = a_fleet(chance, 90)
    snapshot, query = RoutingSnapshot(fleet.table, fleet.now_s, {}, {}), a_query(chance, fleet)
    scanned = ScannedCosts(snapshot, query, set())
    searched = SearchedCosts(snapshot, query, set(), set())
    assert searched.best_two() == scanned.best_two()
    slots = list(snapshot.slots.values())
    assert [searched.at(slot) for slot in slots] == [scanned.at(slot) for slot in slots]
    some_slots = chance.sample(slots, len(slots) // 2)
    assert searched.cheapest_of(some_slots) == scanned.cheapest_of(some_slots)
    for limit_ms in (-1.0, scanned.best_two().second_ms, 300.0):
        assert searched.up_to(limit_ms) == [
            slot for slot in scanned.up_to(limit_ms) if snapshot.routes[slot] is not None
        ]


def test_a_search_looks_at_few_of_many_replicas() -> None:
    table, ledger = ReplicaTable(), InFlightLedger()
    table.set_routes(
        [
            Route(
                replica_id=ReplicaId(f"r{n}"),
                deployment_id=DeploymentId("d"),
                version=1,
                node_id=NodeId(f"n{n}"),
                pop=PopId(f"p{n % 20}"),
                address="x:1",
                tokens_in_flight_max=10**6,
                prefill_tokens_per_s=1000.0,
            )
            for n in range(600)
        ]
    )
    for n in range(600):
        replica_id = ReplicaId(f"r{n}")
        table.refresh(table.slots[replica_id], 20.0 * (n % 20), ledger.load_of(replica_id), NOW_S)
    snapshot = RoutingSnapshot(table, NOW_S, {}, {})
    searched = SearchedCosts(snapshot, RouteQuery("q", 100, 100), set(), set())
    searched.best_two()
    assert len(searched._pops) == 1
