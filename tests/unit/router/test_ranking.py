"""Ranking of replicas, by examples and by properties."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import Route
from nodeagent.decide.requests.handoff import MARGIN_MS, choose_handoff
from router.decide.caches.affinity import (
    SessionBinding,
    SessionTable,
    hash64,
    rendezvous_score,
    rendezvous_winner,
    within_load_bound,
)
from router.decide.caches.prefix_index import PrefixMatch, PrefixMatches
from router.decide.choice.handoff import handoff_peers
from router.decide.choice.peer_replicas import peer_of_ranked
from router.decide.choice.ranking import (
    REFUSAL_FACTOR,
    UNEXPECTED_QUEUE_MS,
    RankedRoutes,
    RouteQuery,
    rank,
)
from router.decide.replicas.latency import UNUSED_REPLICA_MS
from router.decide.replicas.replica_table import (
    DECODE_SLOWDOWN,
    DECODE_SLOWDOWN_MAX,
    SPILLOVER_LASTS_MS,
    ReplicaTable,
    RoutingSnapshot,
)
from router.decide.replicas.tokens_in_flight import InFlightLedger

NOW_S = 1000.0


def a_query(**changes: Any) -> RouteQuery:
    return RouteQuery(
        **{"request_id": "req-1", "prompt_tokens": 100, "output_tokens": 100, **changes}
    )


QUERY = a_query()


class Candidate(NamedTuple):
    """One replica of a test: its round trip, what it has in flight, its prefill rate."""

    name: str
    rtt_ms: float = 1.0
    prefill: int = 0
    decode: int = 0
    rate: float = 1000.0
    is_unused: bool = False
    pop: str = "ams"

    @property
    def route(self) -> Route:
        return Route(
            replica_id=ReplicaId(self.name),
            deployment_id=DeploymentId("d"),
            version=1,
            node_id=NodeId(f"n-{self.name}"),
            pop=PopId(self.pop),
            address="x:1",
            tokens_in_flight_max=1000,
            prefill_tokens_per_s=self.rate,
        )


def a_table(candidates: Sequence[Candidate]) -> ReplicaTable:
    table, ledger = ReplicaTable(), InFlightLedger(lambda: 0.0)
    table.set_routes([candidate.route for candidate in candidates])
    for candidate in candidates:
        replica_id, slot = ReplicaId(candidate.name), table.slots[ReplicaId(candidate.name)]
        if not candidate.is_unused:
            table.corrections[slot].answers = 1
        if candidate.prefill + candidate.decode:
            ledger.reserve(
                replica_id,
                prefill=candidate.prefill,
                decode=candidate.decode,
                work_ms=1000 * candidate.prefill / candidate.rate,
                # It arrives now: a request sent now would arrive half a round trip later.
                arrives_s=NOW_S + candidate.rtt_ms / 2000,
            )
        table.refresh(slot, candidate.rtt_ms, ledger.load_of(replica_id), NOW_S)
    return table


def a_snapshot(candidates: Sequence[Candidate], **ejected: float) -> RoutingSnapshot:
    until = {ReplicaId(name): until_s for name, until_s in ejected.items()}
    return RoutingSnapshot(a_table(candidates), NOW_S, until, {})


def order(
    candidates: Sequence[Candidate], query: RouteQuery = QUERY, **ejected: float
) -> list[str]:
    routes = rank(a_snapshot(candidates, **ejected), query)
    return [ranked.route.replica_id for ranked in routes]


def test_an_adapters_requests_stay_where_it_is_loaded_until_loading_it_is_sooner() -> None:
    cold, warm = Candidate("cold", 2.0), Candidate("warm", 40.0)
    assert order([cold, warm]) == ["cold", "warm"]
    loaded_at_warm = a_query(adapter_ms=150.0, adapter_mask=1 << 1)
    assert order([cold, warm], loaded_at_warm) == ["warm", "cold"]
    assert order([cold, warm._replace(prefill=200)], loaded_at_warm) == ["cold", "warm"]
    # Nobody has it: all routers choose by the adapter's id, in place of the request's.
    alike = [Candidate(f"r{number}") for number in range(8)]
    chosen = {order(alike, a_query(request_id="ft-1", adapter_ms=150.0))[0] for _ in range(3)}
    assert len(chosen) == 1


def test_the_nearest_wins_until_its_queue_costs_more_than_the_distance() -> None:
    near, far = Candidate("near", 2.0), Candidate("far", 90.0)
    assert order([far, near]) == ["near", "far"]
    queued = near._replace(prefill=200)
    routes = rank(a_snapshot([far, queued]), QUERY)
    assert [r.route.replica_id for r in routes] == ["far", "near"]
    assert routes[0].reason_header == "soonest-warm rtt=90.0ms queue=0ms prefill=100ms"
    assert routes[1].reason_header == "nearest-warm rtt=2.0ms queue=200ms prefill=100ms"


def test_a_full_replica_is_passed_over_and_counted() -> None:
    full = Candidate("full", decode=900)
    routes = rank(a_snapshot([full]), QUERY)
    assert (list(routes), bool(routes), routes.full_count) == ([], False, 1)
    assert order([full, Candidate("free", 300.0)]) == ["free"]
    both = rank(a_snapshot([full, Candidate("free")]), QUERY, frozenset({ReplicaId("full")}))
    assert (len(both), both.full_count) == (1, 0)


def test_pending_prefill_tokens_count_the_cost_of_depth() -> None:
    table = a_table([Candidate("a")])
    table.depth_cost.per_token = 2e-5
    ranked = rank(RoutingSnapshot(table, NOW_S, {}, {}), a_query(prompt_tokens=50_000))[0]
    assert (ranked.uncached_tokens, ranked.pending_prefill_tokens) == (50_000, 75_000)


def test_handoff_peers_are_the_replicas_of_the_pop_with_capacity_the_first_route_ahead() -> None:
    candidates = [
        Candidate("a", prefill=50),
        Candidate("b", 1.5, prefill=200, rate=2000.0),
        Candidate("full", decode=900),
        Candidate("c", prefill=300),
        Candidate("far", 90.0, pop="iad"),
    ]
    table = a_table(candidates)
    matches = PrefixMatches(0.0, [PrefixMatch(1 << table.slots[ReplicaId("b")], 0.5)])
    routes = rank(RoutingSnapshot(table, NOW_S, {}, {}), a_query(matches=matches), {ReplicaId("x")})
    peers = handoff_peers(routes, routes[0])
    assert [(one.replica_id, one.pending_prefill_tokens, one.prefill_ms) for one in peers] == [
        ("b", 50, 25),
        ("a", 100, 100),
        ("c", 100, 100),
    ]
    assert [one.token_us for one in peers] == [500, 1000, 1000]
    handed_off = routes.route_to(ReplicaId("c"))
    assert handed_off is not None and handed_off.reason == "handed-off"
    assert routes.route_to(ReplicaId("unknown")) is None


def test_no_handoff_peers_without_others_in_the_pop_or_for_a_short_prefill() -> None:
    far = Candidate("far", 90.0, pop="iad")
    alone = rank(a_snapshot([Candidate("a"), far]), QUERY)
    assert handoff_peers(alone, alone[0]) == []
    quick = rank(a_snapshot([Candidate("a"), Candidate("b")]), a_query(prompt_tokens=4))
    assert handoff_peers(quick, quick[0]) == []


def test_a_node_does_not_undo_a_choice_that_its_router_made_by_the_congestion_charge() -> None:
    table = a_table([Candidate("own", prefill=60), Candidate("idle")])
    table.queued_share = 0.5
    matches = PrefixMatches(0.0, [PrefixMatch(1 << table.slots[ReplicaId("own")], 0.5)])
    routes = rank(RoutingSnapshot(table, NOW_S, {}, {}), a_query(matches=matches))
    assert [ranked.route.replica_id for ranked in routes] == ["own", "idle"]
    assert routes[0].ttft_ms > routes[1].ttft_ms + MARGIN_MS
    peers = handoff_peers(routes, routes[0])
    assert [one.expected_prefill_ms for one in peers] == [50, 100]
    for queued, target in ((60, ""), (160, "idle")):
        handoff = choose_handoff(peers, {ReplicaId("own"): queued, ReplicaId("idle"): 0}, None)
        assert (handoff.target.replica_id if handoff else "") == target


def test_a_token_of_a_very_fast_replica_still_takes_time() -> None:
    # With 0 a node would hand requests off to a replica that sleeps, whatever its wake takes.
    fast = [Candidate("a", prefill=500, rate=5e6), Candidate("b", rate=5e6)]
    routes = rank(a_snapshot(fast), QUERY)
    peers = [peer_of_ranked(ranked) for ranked in routes.peers_of_first(2)]
    assert [peer.token_us for peer in peers] == [1, 1]


def test_an_idle_replica_takes_a_request_larger_than_its_limit() -> None:
    assert order([Candidate("a")], a_query(prompt_tokens=10**6)) == ["a"]


def test_a_faster_replica_may_be_worth_the_distance() -> None:
    slow, fast = Candidate("slow", 1.0, rate=100.0), Candidate("fast", 90.0, rate=100_000.0)
    assert order([slow, fast])[0] == "fast"


def test_a_replica_that_has_not_answered_yet_is_predicted_a_little_slower() -> None:
    unused, used = Candidate("unused", 10.0, is_unused=True), Candidate("used", 10.0)
    assert rank(a_snapshot([unused]), QUERY)[0].overhead_ms == UNUSED_REPLICA_MS
    assert rank(a_snapshot([used]), QUERY)[0].overhead_ms == 0.0
    assert order([unused, used._replace(prefill=300)]) == ["unused", "used"]


def test_the_queue_is_limited_only_if_another_replica_would_be_sooner() -> None:
    alone = rank(a_snapshot([Candidate("a")]), QUERY)[0]
    assert alone.queue_tokens_max == 0
    far = rank(a_snapshot([Candidate("a"), Candidate("b", 400.0)]), QUERY)[0]
    near = rank(a_snapshot([Candidate("a"), Candidate("b", 10.0)]), QUERY)[0]
    # At 1000 tokens per second, one token takes one millisecond.
    assert far.queue_tokens_max == 400 + UNEXPECTED_QUEUE_MS
    assert near.queue_tokens_max == 10 + UNEXPECTED_QUEUE_MS
    queued = rank(a_snapshot([Candidate("a", prefill=50), Candidate("b", 400.0)]), QUERY)[0]
    assert queued.queue_tokens_max == far.queue_tokens_max


def test_each_refusal_lets_a_longer_queue_be() -> None:
    candidates = [Candidate("a"), Candidate("b", 10.0)]
    limits = [
        rank(a_snapshot(candidates), a_query(queue_refusals=count))[0].queue_tokens_max
        for count in (0, 1, 2, 1000)
    ]
    unexpected = [round(UNEXPECTED_QUEUE_MS * REFUSAL_FACTOR**count) for count in (0, 1, 2)]
    assert limits[:3] == [10 + tokens for tokens in unexpected]
    assert limits[3] < 10_000


def test_a_replica_with_running_answers_reads_prompts_slower() -> None:
    free, answering = Candidate("free", 10.0), Candidate("answering", 10.0, decode=600)
    idle, busy = (a_table([candidate]).estimates[0] for candidate in (free, answering))
    assert busy.ms_per_token == idle.ms_per_token * (1 + 600 * DECODE_SLOWDOWN)
    full = a_table([free._replace(decode=10**9)]).estimates[0]
    assert full.ms_per_token == idle.ms_per_token * (1 + DECODE_SLOWDOWN_MAX)


def test_the_assumed_part_of_a_queue_does_not_raise_its_limit() -> None:
    table, ledger, a = (
        a_table([Candidate("a"), Candidate("b", 400.0)]),
        InFlightLedger(lambda: 0.0),
        "a",
    )
    for n in range(61):
        # Reports that alternate: one says nothing about the next.
        ledger.record_other_routers(ReplicaId(a), 200 * (n % 2), 0, NOW_S - 62 + n)
    table.refresh(table.slots[ReplicaId(a)], 1.0, ledger.load_of(ReplicaId(a)), NOW_S)
    ranked = rank(RoutingSnapshot(table, NOW_S, {}, {}), QUERY)[0]
    assert ranked.route.replica_id == a
    assert 90 < ranked.queue_ms < 110
    assert ranked.queue_tokens_max < 400 - ranked.queue_ms + UNEXPECTED_QUEUE_MS + 5


class ChargedTable:
    """A near replica, and a farther one that has half of each prompt cached."""

    def __init__(self, near: Candidate, holder: Candidate, *others: Candidate) -> None:
        self.table = a_table([near, holder, *others])
        slot = self.table.slots[ReplicaId(holder.name)]
        self.query = a_query(matches=PrefixMatches(0.0, [PrefixMatch(1 << slot, 0.5)]))

    def chosen(self) -> str:
        return self.ranked()[0].route.replica_id

    def ranked(self) -> RankedRoutes:
        self.table.spilled_at_ms = 1000 * NOW_S
        return rank(RoutingSnapshot(self.table, NOW_S, {}, {}), self.query)

    def send(self, *unhealthy: str) -> None:
        names = frozenset(ReplicaId(name) for name in unhealthy)
        sent = self.ranked()[0]
        for _ in range(400):
            self.table.record_sent(0, sent, NOW_S, names)


BUSY_NEAR, BUSY_HOLDER = Candidate("a", 1.0, prefill=50), Candidate("b", 60.0, prefill=50)


def test_the_congestion_charge_makes_a_cache_miss_cost_more() -> None:
    fleet = ChargedTable(BUSY_NEAR, BUSY_HOLDER)
    assert fleet.chosen() == "a"
    fleet.send()
    assert fleet.chosen() == "b"


def test_a_queue_that_another_replica_would_spare_is_not_congestion() -> None:
    slow = Candidate("idle", 1.0, rate=400.0)
    fleet = ChargedTable(BUSY_NEAR, BUSY_HOLDER, slow)
    fleet.send()
    assert fleet.table.queued_share == 0.0
    assert fleet.chosen() == "a"
    # One that cannot serve spares nothing.
    fleet.send("idle", "of another table")
    assert fleet.chosen() == "b"


def test_an_idle_replica_far_away_spares_only_what_is_left_of_the_queue() -> None:
    for others, wait_ms in (((), 50), ((Candidate("far", 31.0),), 30)):
        fleet = ChargedTable(BUSY_NEAR, BUSY_HOLDER, *others)
        ttft_ms = fleet.ranked()[0].ttft_ms
        fleet.send()
        assert round(fleet.table.queued_share * ttft_ms) == wait_ms


def test_a_session_stays_at_its_replica_unless_that_is_much_slower() -> None:
    query = a_query(session="s", binding=SessionBinding(ReplicaId("b"), 90, 0.0))
    a, b = Candidate("a", 1.0), Candidate("b", 60.0)
    routes = rank(a_snapshot([a, b]), query)
    assert routes[0].reason_header == "session rtt=60.0ms queue=0ms prefill=10ms"
    assert routes[0].uncached_tokens == 10
    assert order([a, b._replace(prefill=500)], query)[0] == "a"


def test_processes_that_share_only_the_table_choose_the_same_replica_for_a_session() -> None:
    names = "abcd"
    here = a_snapshot([Candidate(name, 5.0) for name in names])
    # Another process has other loads, slots and round trips.
    loads = {"a": 15, "b": 0, "c": 10, "d": 5}
    there = a_snapshot([Candidate(name, 5.5, prefill=loads[name]) for name in reversed(names)])
    chosen = []
    for n in range(200):
        query = a_query(session=f"s{n}")
        first, second = (rank(snapshot, query)[0].route for snapshot in (here, there))
        assert first.replica_id == second.replica_id
        chosen.append(first.replica_id)
    assert all(30 < chosen.count(ReplicaId(name)) < 75 for name in names)


def test_a_new_session_does_not_go_to_a_much_slower_replica() -> None:
    table = [Candidate("a", 5.0, prefill=500), Candidate("b", 5.0)]
    firsts = {order(table, a_query(session=f"s{n}"))[0] for n in range(40)}
    assert firsts == {"b"}


def test_a_cached_prefix_attracts_a_request_as_far_as_it_saves_time() -> None:
    a, b = Candidate("a", 1.0), Candidate("b", 60.0)
    slots = a_table([a, b]).slots
    half = PrefixMatches(0.0, [PrefixMatch(1 << slots[ReplicaId("b")], 0.9)])
    routes = rank(a_snapshot([a, b]), a_query(matches=half))
    assert routes[0].reason_header == "prefix soonest-warm rtt=60.0ms queue=0ms prefill=10ms"
    little = PrefixMatches(0.0, [PrefixMatch(1 << slots[ReplicaId("b")], 0.2)])
    assert order([a, b], a_query(matches=little))[0] == "a"
    # A prefix that all hold changes nothing, and what b holds beyond it saves too little.
    common = PrefixMatches(0.7, [PrefixMatch(1 << slots[ReplicaId("b")], 0.9)])
    first = rank(a_snapshot([a, b]), a_query(matches=common))[0]
    assert (first.route.replica_id, first.uncached_tokens) == ("a", 30)


def test_spillover_must_save_time_and_then_goes_on_while_it_is_sooner() -> None:
    near, far = Candidate("near", 1.0, prefill=45), Candidate("far", 40.0)
    assert order([near, far])[0] == "near"
    assert order([near._replace(prefill=100), far])[0] == "far"
    table = a_table([near, far])
    table.spilled_at_ms = 1000 * NOW_S - SPILLOVER_LASTS_MS / 2
    queries = [a_query(request_id=f"req-{n}") for n in range(40)]
    chosen = {
        rank(RoutingSnapshot(table, NOW_S, {}, {}), query)[0].route.replica_id for query in queries
    }
    assert "far" in chosen


def test_alike_replicas_share_requests_and_a_request_always_goes_to_the_same_one() -> None:
    snapshot = a_snapshot([Candidate(name) for name in "abcd"])
    chosen = [
        rank(snapshot, a_query(request_id=f"req-{n}"))[0].route.replica_id for n in range(400)
    ]
    assert all(70 < chosen.count(ReplicaId(name)) < 130 for name in "abcd")
    assert len({rank(snapshot, QUERY)[0].route.replica_id for _ in range(9)}) == 1


def test_a_snapshot_does_not_change_with_the_table() -> None:
    table = a_table([Candidate("a"), Candidate("b")])
    snapshot = RoutingSnapshot(table, NOW_S, {}, {})
    columns = (snapshot.routes, snapshot.hashes, snapshot.weights)
    before = [list(column) for column in columns]
    estimates = [snapshot.estimates[slot] for slot in range(2)]
    waits_ms = snapshot.columns.costs(0.0, 1.0, 0.0).up_to(inf)
    table.set_routes([Candidate("c").route])
    table.refresh(
        table.slots[ReplicaId("c")],
        99.0,
        InFlightLedger(lambda: 0.0).load_of(ReplicaId("c")),
        NOW_S,
    )
    assert [list(column) for column in columns] == before
    assert [snapshot.estimates[slot] for slot in range(2)] == estimates
    assert snapshot.columns.costs(0.0, 1.0, 0.0).up_to(inf) == waits_ms
    assert set(snapshot.slots) == {"a", "b"}


def test_a_slot_without_a_replica_is_never_ranked() -> None:
    table = a_table([Candidate("a"), Candidate("b"), Candidate("c")])
    freed = table.set_routes([Candidate("c").route])
    assert len(freed) == 2
    routes = rank(RoutingSnapshot(table, NOW_S, {}, {}), QUERY)
    assert ([r.route.replica_id for r in routes], routes.full_count) == (["c"], 0)
    table.set_routes([Candidate("c").route, Candidate("d").route])
    assert len(table) == 3
    assert table.slots[ReplicaId("d")] in freed


def test_unhealthy_replicas_are_excluded_or_if_too_many_the_last_resort() -> None:
    four = [Candidate(name) for name in "abcd"]
    assert set(order(four, a=9.0, b=8.0)) == {"c", "d"}
    assert order(four, a=9.0, b=8.0, c=7.0) == ["d"]
    full = Candidate("d", decode=900)
    assert set(order([*four[:3], full], a=9.0, b=8.0, c=7.0)) == {"a", "b", "c"}
    assert set(order(four, a=9.0, b=8.0, c=7.0, d=6.0)) == {"a", "b", "c", "d"}
    assert order(four[:1], a=9.0) == ["a"]


NAMES = st.lists(st.sampled_from([f"r{n}" for n in range(12)]), unique=True, min_size=1)


@settings(deadline=None, max_examples=60)
@given(NAMES, st.text(max_size=20))
def test_every_router_chooses_the_same_replica_for_a_session(
    names: list[str], session: str
) -> None:
    query = a_query(session="t/" + session)
    here = [Candidate(name) for name in names]
    there = list(reversed(here))
    assert (
        order(here, query)[0] == order(there, a_query(request_id="req-2", session=query.session))[0]
    )
    first = order(here, query)[0]
    left = [candidate for candidate in here if candidate.name != "r0"]
    if left and first != "r0":
        # The session does not move when another replica is removed.
        assert order(left, query)[0] == first


RANKED = st.lists(
    st.tuples(
        st.floats(0.1, 400),
        st.integers(0, 3000),
        st.integers(0, 3000),
        st.floats(100, 20_000),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(RANKED, st.integers(1, 2000), st.sets(st.integers(0, 11)), st.integers(0, 11))
def test_every_replica_with_capacity_is_ranked_once_with_its_prediction(
    numbers: list[tuple[float, int, int, float, bool]], tokens: int, out: set[int], holder: int
) -> None:
    candidates = [Candidate(f"r{n}", *numbers[n]) for n in range(len(numbers))]
    excluded = frozenset(ReplicaId(f"r{n}") for n in out)
    query = a_query(
        prompt_tokens=tokens, matches=PrefixMatches(0.1, [PrefixMatch(1 << holder, 0.5)])
    )
    table = a_table(candidates)
    if holder >= len(table):
        query = a_query(prompt_tokens=tokens, matches=PrefixMatches(0.1, []))
    routes = rank(RoutingSnapshot(table, NOW_S, {}, {}), query, excluded)
    ranked = list(routes)
    has_capacity = [
        c.name
        for c in candidates
        if not c.prefill + c.decode or c.prefill + c.decode + tokens + 100 <= 1000
    ]
    assert sorted(r.route.replica_id for r in ranked) == sorted(set(has_capacity) - excluded)
    usable = [c for c in candidates if c.name not in excluded]
    assert routes.full_count == len(usable) - len(ranked)
    for route in ranked:
        assert route.ttft_ms >= route.rtt_ms
        assert route.queue_ms >= 0
        assert 0 < route.uncached_tokens <= tokens
        assert route.reason


def test_rendezvous_hashing_follows_the_weights() -> None:
    hashes, weights = [hash64("small"), hash64("large")], [1.0, 3.0]
    wins = sum(rendezvous_winner(hash64(f"s{n}"), [0, 1], hashes, weights) for n in range(4000))
    assert 0.71 < wins / 4000 < 0.79


def test_a_new_replica_moves_only_the_sessions_it_wins() -> None:
    hashes = [hash64(f"r{n}") for n in range(11)]
    before = [
        rendezvous_winner(hash64(f"s{n}"), range(10), hashes, [1.0] * 11) for n in range(3000)
    ]
    after = [rendezvous_winner(hash64(f"s{n}"), range(11), hashes, [1.0] * 11) for n in range(3000)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {10}
    assert 0.07 < len(moved) / 3000 < 0.115


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_score_is_always_a_positive_number(subject: int, seed: int) -> None:
    assert 0 < rendezvous_score(subject, seed) < float("inf")


@given(st.lists(st.tuples(st.integers(0, 9999), st.floats(1, 99)), min_size=1, max_size=9))
def test_the_load_bound_leaves_at_least_one(loads: list[tuple[int, float]]) -> None:
    tokens, weights = [float(load[0]) for load in loads], [load[1] for load in loads]
    left = within_load_bound(range(len(loads)), dict(enumerate(tokens)), weights)
    assert left
    assert min(range(len(loads)), key=lambda slot: tokens[slot] / weights[slot]) in left


def test_sessions_are_bounded_and_expire() -> None:
    sessions = SessionTable(sessions_max=3, ttl_s=10)
    for n in range(5):
        sessions.bind(f"s{n}", ReplicaId("a"), n, float(n))
    assert len(sessions) == 3
    assert sessions.lookup("s0", 5.0) is None
    assert sessions.lookup("s4", 5.0) == SessionBinding(ReplicaId("a"), 4, 4.0)
    assert sessions.lookup("s4", 15.0) is None
