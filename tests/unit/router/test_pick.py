"""The choice of a replica, by rows and by properties."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import Route
from router.decide.affinity import Seat, Sessions, draw, rendezvous, seed_of, within_bound
from router.decide.board import SPILL_LASTS_MS, Board, Picture
from router.decide.latency import COLD_MS
from router.decide.pick import SURPRISE_MS, Ask, rank
from router.decide.prefixes import Held, Match
from router.decide.tokens_in_flight import TokensInFlight

NOW_S = 1000.0


def an_ask(**changes: Any) -> Ask:
    return Ask(**{"request_id": "req-1", "prompt_tokens": 100, "output_tokens": 100, **changes})


ASK = an_ask()


class Candidate(NamedTuple):
    """One replica of a test: how far, what it has in flight, how fast it reads."""

    name: str
    rtt_ms: float = 1.0
    prefill: int = 0
    decode: int = 0
    rate: float = 1000.0
    is_cold: bool = False
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


def a_board(candidates: Sequence[Candidate]) -> Board:
    board, ledger = Board(), TokensInFlight()
    board.adopt([candidate.route for candidate in candidates])
    for candidate in candidates:
        replica_id, slot = ReplicaId(candidate.name), board.slots[ReplicaId(candidate.name)]
        if not candidate.is_cold:
            board.paces[slot].answers = 1
        if candidate.prefill + candidate.decode:
            ledger.reserve(
                replica_id,
                prefill=candidate.prefill,
                decode=candidate.decode,
                work_ms=1000 * candidate.prefill / candidate.rate,
                # It is there now: a request sent now comes half a round trip later.
                arrives_s=NOW_S + candidate.rtt_ms / 2000,
            )
        board.refresh(slot, candidate.rtt_ms, ledger.line(replica_id), NOW_S)
    return board


def a_picture(candidates: Sequence[Candidate], **ejected: float) -> Picture:
    until = {ReplicaId(name): until_s for name, until_s in ejected.items()}
    return Picture(a_board(candidates), NOW_S, until, {})


def order(candidates: Sequence[Candidate], ask: Ask = ASK, **ejected: float) -> list[str]:
    routes = rank(a_picture(candidates, **ejected), ask)
    return [ranked.route.replica_id for ranked in routes]


def test_the_nearest_wins_until_its_queue_costs_more_than_the_way() -> None:
    near, far = Candidate("near", 2.0), Candidate("far", 90.0)
    assert order([far, near]) == ["near", "far"]
    queued = near._replace(prefill=200)
    routes = rank(a_picture([far, queued]), ASK)
    assert [r.route.replica_id for r in routes] == ["far", "near"]
    assert routes[0].why == "soonest-warm rtt=90.0ms queue=0ms prefill=100ms"
    assert routes[1].why == "nearest-warm rtt=2.0ms queue=200ms prefill=100ms"


def test_a_full_replica_is_passed_over_and_counted() -> None:
    full = Candidate("full", decode=900)
    routes = rank(a_picture([full]), ASK)
    assert (list(routes), bool(routes), routes.full) == ([], False, 1)
    assert order([full, Candidate("free", 300.0)]) == ["free"]
    both = rank(a_picture([full, Candidate("free")]), ASK, frozenset({ReplicaId("full")}))
    assert (len(both), both.full) == (1, 0)


def test_deep_tokens_are_told_as_the_work_they_are() -> None:
    board = a_board([Candidate("a")])
    board.stretch.per_token = 2e-5
    ranked = rank(Picture(board, NOW_S, {}, {}), an_ask(prompt_tokens=50_000))[0]
    assert (ranked.uncached_tokens, ranked.unread_tokens) == (50_000, 75_000)


def test_siblings_are_those_of_the_same_city_with_room_the_asked_one_first() -> None:
    candidates = [
        Candidate("a", prefill=50),
        Candidate("b", 1.5, prefill=200, rate=2000.0),
        Candidate("full", decode=900),
        Candidate("c", prefill=300),
        Candidate("far", 90.0, pop="iad"),
    ]
    board = a_board(candidates)
    held = Held(0.0, [Match(1 << board.slots[ReplicaId("b")], 0.5)])
    routes = rank(Picture(board, NOW_S, {}, {}), an_ask(held=held), {ReplicaId("x")})
    siblings = routes.siblings(routes[0])
    assert [(one.replica_id, one.pending_prefill_tokens, one.prefill_ms) for one in siblings] == [
        ("b", 50, 25),
        ("a", 100, 100),
        ("c", 100, 100),
    ]
    assert [one.token_us for one in siblings] == [500, 1000, 1000]
    passed = routes.of(ReplicaId("c"))
    assert passed is not None and passed.reason == "passed-on"
    assert routes.of(ReplicaId("nobody")) is None


def test_who_is_alone_or_soon_done_has_no_siblings_named() -> None:
    far = Candidate("far", 90.0, pop="iad")
    alone = rank(a_picture([Candidate("a"), far]), ASK)
    assert alone.siblings(alone[0]) == []
    quick = rank(a_picture([Candidate("a"), Candidate("b")]), an_ask(prompt_tokens=4))
    assert quick.siblings(quick[0]) == []


def test_an_idle_replica_takes_what_is_larger_than_its_bound() -> None:
    assert order([Candidate("a")], an_ask(prompt_tokens=10**6)) == ["a"]


def test_a_faster_replica_may_be_worth_the_way() -> None:
    slow, fast = Candidate("slow", 1.0, rate=100.0), Candidate("fast", 90.0, rate=100_000.0)
    assert order([slow, fast])[0] == "fast"


def test_a_replica_that_never_answered_is_thought_a_little_slower() -> None:
    cold, warm = Candidate("cold", 10.0, is_cold=True), Candidate("warm", 10.0)
    assert rank(a_picture([cold]), ASK)[0].overhead_ms == COLD_MS
    assert rank(a_picture([warm]), ASK)[0].overhead_ms == 0.0
    assert order([cold, warm._replace(prefill=300)]) == ["cold", "warm"]


def test_a_longer_queue_turns_away_only_where_another_place_is_better() -> None:
    alone = rank(a_picture([Candidate("a")]), ASK)[0]
    assert alone.queue_tokens_max == 0
    far = rank(a_picture([Candidate("a"), Candidate("b", 400.0)]), ASK)[0]
    near = rank(a_picture([Candidate("a"), Candidate("b", 10.0)]), ASK)[0]
    # A thousand tokens a second: a token a millisecond.
    assert far.queue_tokens_max == 400 + SURPRISE_MS
    assert near.queue_tokens_max == 10 + SURPRISE_MS
    queued = rank(a_picture([Candidate("a", prefill=50), Candidate("b", 400.0)]), ASK)[0]
    assert queued.queue_tokens_max == far.queue_tokens_max


def test_a_queue_that_is_only_guessed_is_not_put_up_with() -> None:
    board, ledger, a = a_board([Candidate("a"), Candidate("b", 400.0)]), TokensInFlight(), "a"
    for n in range(61):
        # Words that change each time: the next one says nothing of the one after.
        ledger.hear_others(ReplicaId(a), 200 * (n % 2), 0, NOW_S - 62 + n)
    board.refresh(board.slots[ReplicaId(a)], 1.0, ledger.line(ReplicaId(a)), NOW_S)
    ranked = rank(Picture(board, NOW_S, {}, {}), ASK)[0]
    assert ranked.route.replica_id == a
    assert 90 < ranked.queue_ms < 110
    assert ranked.queue_tokens_max < 400 - ranked.queue_ms + SURPRISE_MS + 5


def test_with_queues_everywhere_a_miss_of_the_cache_counts_more() -> None:
    board = a_board([Candidate("a", 1.0), Candidate("b", 60.0)])
    held = Held(0.0, [Match(1 << board.slots[ReplicaId("b")], 0.5)])
    ask = an_ask(held=held)
    assert rank(Picture(board, NOW_S, {}, {}), ask)[0].route.replica_id == "a"
    board.spilled_at_ms = 1000 * NOW_S
    waiting = rank(Picture(board, NOW_S, {}, {}), ask)[0]
    waiting.queue_ms = 50.0
    for _ in range(400):
        board.went(0, waiting, NOW_S)
    assert rank(Picture(board, NOW_S, {}, {}), ask)[0].route.replica_id == "b"


def test_a_session_stays_on_its_seat_unless_that_is_much_slower() -> None:
    ask = an_ask(session="s", seat=Seat(ReplicaId("b"), 90, 0.0))
    a, b = Candidate("a", 1.0), Candidate("b", 60.0)
    routes = rank(a_picture([a, b]), ask)
    assert routes[0].why == "session rtt=60.0ms queue=0ms prefill=10ms"
    assert routes[0].uncached_tokens == 10
    assert order([a, b._replace(prefill=500)], ask)[0] == "a"


def test_processes_that_share_only_the_table_presume_the_same_seat() -> None:
    names = "abcd"
    one = a_picture([Candidate(name, 5.0) for name in names])
    # Another process sees other loads, has other slots, and a nearer view of some round trips.
    loads = {"a": 15, "b": 0, "c": 10, "d": 5}
    other = a_picture([Candidate(name, 5.5, prefill=loads[name]) for name in reversed(names)])
    went = []
    for n in range(200):
        ask = an_ask(session=f"s{n}")
        first, second = (rank(picture, ask)[0].route for picture in (one, other))
        assert first.replica_id == second.replica_id
        went.append(first.replica_id)
    assert all(30 < went.count(ReplicaId(name)) < 75 for name in names)


def test_a_new_session_leaves_a_presumed_seat_that_is_much_slower() -> None:
    board = [Candidate("a", 5.0, prefill=500), Candidate("b", 5.0)]
    firsts = {order(board, an_ask(session=f"s{n}"))[0] for n in range(40)}
    assert firsts == {"b"}


def test_what_is_cached_draws_as_far_as_it_saves() -> None:
    a, b = Candidate("a", 1.0), Candidate("b", 60.0)
    slots = a_board([a, b]).slots
    half = Held(0.0, [Match(1 << slots[ReplicaId("b")], 0.9)])
    routes = rank(a_picture([a, b]), an_ask(held=half))
    assert routes[0].why == "prefix soonest-warm rtt=60.0ms queue=0ms prefill=10ms"
    little = Held(0.0, [Match(1 << slots[ReplicaId("b")], 0.2)])
    assert order([a, b], an_ask(held=little))[0] == "a"
    # What everyone holds moves nobody, and what b holds beyond that too little.
    common = Held(0.7, [Match(1 << slots[ReplicaId("b")], 0.9)])
    first = rank(a_picture([a, b]), an_ask(held=common))[0]
    assert (first.route.replica_id, first.uncached_tokens) == ("a", 30)


def test_leaving_home_must_pay_and_then_goes_on_while_it_is_sooner() -> None:
    home, away = Candidate("home", 1.0, prefill=45), Candidate("away", 40.0)
    assert order([home, away])[0] == "home"
    assert order([home._replace(prefill=100), away])[0] == "away"
    board = a_board([home, away])
    board.spilled_at_ms = 1000 * NOW_S - SPILL_LASTS_MS / 2
    asks = [an_ask(request_id=f"req-{n}") for n in range(40)]
    went = {rank(Picture(board, NOW_S, {}, {}), ask)[0].route.replica_id for ask in asks}
    assert "away" in went


def test_alike_replicas_share_the_requests_and_one_request_goes_one_way() -> None:
    picture = a_picture([Candidate(name) for name in "abcd"])
    went = [rank(picture, an_ask(request_id=f"req-{n}"))[0].route.replica_id for n in range(400)]
    assert all(70 < went.count(ReplicaId(name)) < 130 for name in "abcd")
    assert len({rank(picture, ASK)[0].route.replica_id for _ in range(9)}) == 1


def test_a_picture_does_not_change_with_the_board() -> None:
    board = a_board([Candidate("a"), Candidate("b")])
    picture = Picture(board, NOW_S, {}, {})
    columns = (picture.routes, picture.times, picture.facts, picture.seeds, picture.weights)
    shown = [list(column) for column in columns]
    board.adopt([Candidate("c").route])
    board.refresh(board.slots[ReplicaId("c")], 99.0, TokensInFlight().line(ReplicaId("c")), NOW_S)
    assert [list(column) for column in columns] == shown
    assert set(picture.slots) == {"a", "b"}


def test_a_slot_without_a_replica_is_never_ranked() -> None:
    board = a_board([Candidate("a"), Candidate("b"), Candidate("c")])
    gone = board.adopt([Candidate("c").route])
    assert len(gone) == 2
    routes = rank(Picture(board, NOW_S, {}, {}), ASK)
    assert ([r.route.replica_id for r in routes], routes.full) == (["c"], 0)
    board.adopt([Candidate("c").route, Candidate("d").route])
    assert len(board) == 3
    assert board.slots[ReplicaId("d")] in gone


def test_who_is_ill_is_left_alone_and_among_too_many_ill_asked_last() -> None:
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
def test_a_session_goes_the_same_way_from_every_router(names: list[str], session: str) -> None:
    ask = an_ask(session="t/" + session)
    here = [Candidate(name) for name in names]
    there = list(reversed(here))
    assert order(here, ask)[0] == order(there, an_ask(request_id="req-2", session=ask.session))[0]
    first = order(here, ask)[0]
    left = [candidate for candidate in here if candidate.name != "r0"]
    if left and first != "r0":
        # Losing another replica moves no session.
        assert order(left, ask)[0] == first


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
def test_every_replica_with_room_is_ranked_once_with_what_is_predicted(
    numbers: list[tuple[float, int, int, float, bool]], tokens: int, out: set[int], held_by: int
) -> None:
    candidates = [Candidate(f"r{n}", *numbers[n]) for n in range(len(numbers))]
    excluded = frozenset(ReplicaId(f"r{n}") for n in out)
    ask = an_ask(prompt_tokens=tokens, held=Held(0.1, [Match(1 << held_by, 0.5)]))
    board = a_board(candidates)
    if held_by >= len(board):
        ask = an_ask(prompt_tokens=tokens, held=Held(0.1, []))
    routes = rank(Picture(board, NOW_S, {}, {}), ask, excluded)
    ranked = list(routes)
    has_room = [
        c.name
        for c in candidates
        if not c.prefill + c.decode or c.prefill + c.decode + tokens + 100 <= 1000
    ]
    assert sorted(r.route.replica_id for r in ranked) == sorted(set(has_room) - excluded)
    usable = [c for c in candidates if c.name not in excluded]
    assert routes.full == len(usable) - len(ranked)
    for one in ranked:
        assert one.ttft_ms >= one.rtt_ms
        assert one.queue_ms >= 0
        assert 0 < one.uncached_tokens <= tokens
        assert one.reason


def test_the_rendezvous_follows_the_weights() -> None:
    seeds, weights = [seed_of("small"), seed_of("large")], [1.0, 3.0]
    wins = sum(draw(seed_of(f"s{n}"), [0, 1], seeds, weights) for n in range(4000))
    assert 0.71 < wins / 4000 < 0.79


def test_a_replica_more_moves_only_what_it_wins() -> None:
    seeds = [seed_of(f"r{n}") for n in range(11)]
    before = [draw(seed_of(f"s{n}"), range(10), seeds, [1.0] * 11) for n in range(3000)]
    after = [draw(seed_of(f"s{n}"), range(11), seeds, [1.0] * 11) for n in range(3000)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {10}
    assert 0.07 < len(moved) / 3000 < 0.115


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_score_is_always_a_positive_number(subject: int, seed: int) -> None:
    assert 0 < rendezvous(subject, seed) < float("inf")


@given(st.lists(st.tuples(st.integers(0, 9999), st.floats(1, 99)), min_size=1, max_size=9))
def test_the_bound_leaves_somebody(loads: list[tuple[int, float]]) -> None:
    tokens, weights = [float(load[0]) for load in loads], [load[1] for load in loads]
    left = within_bound(range(len(loads)), tokens, weights)
    assert left
    assert min(range(len(loads)), key=lambda slot: tokens[slot] / weights[slot]) in left


def test_sessions_are_bounded_and_end() -> None:
    sessions = Sessions(sessions_max=3, ttl_s=10)
    for n in range(5):
        sessions.sat(f"s{n}", ReplicaId("a"), n, float(n))
    assert len(sessions) == 3
    assert sessions.find("s0", 5.0) is None
    assert sessions.find("s4", 5.0) == Seat(ReplicaId("a"), 4, 4.0)
    assert sessions.find("s4", 15.0) is None
