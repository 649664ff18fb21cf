"""The choice of a replica, by rows and by properties."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import Route
from router.decide.affinity import Seat, Sessions, rendezvous
from router.decide.latency import RoundTripFilter, expected_rtt_ms
from router.decide.pick import Ask, Candidate, Picture, rank
from router.decide.tokens_in_flight import NOTHING, InFlight

ASK = Ask("req-1", prompt_tokens=100, output_tokens=100)


def a_candidate(
    name: str, rtt_ms: float = 1.0, in_flight: InFlight = NOTHING, rate: float = 1000.0
) -> Candidate:
    route = Route(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("d"),
        version=1,
        node_id=NodeId(f"n-{name}"),
        pop=PopId("ams"),
        address="x:1",
        tokens_in_flight_max=1000,
        prefill_tokens_per_s=rate,
    )
    return Candidate(route, rtt_ms, in_flight)


def order(candidates: list[Candidate], ask: Ask = ASK, **ejected: float) -> list[str]:
    until = {ReplicaId(name): until_s for name, until_s in ejected.items()}
    return [ranked.route.replica_id for ranked in rank(Picture(candidates, until), ask).routes]


def test_the_nearest_wins_until_its_queue_costs_more_than_the_way() -> None:
    near, far = a_candidate("near", 2.0), a_candidate("far", 90.0)
    assert order([far, near]) == ["near", "far"]
    queued = near._replace(in_flight=InFlight(200, 0, 2))
    ranking = rank(Picture([far, queued], {}), ASK)
    assert [r.route.replica_id for r in ranking.routes] == ["far", "near"]
    assert ranking.routes[0].why == "soonest-warm rtt=90.0ms queue=0ms prefill=100ms"
    assert ranking.routes[1].why == "nearest-warm rtt=2.0ms queue=200ms prefill=100ms"


def test_a_full_replica_is_passed_over_and_counted() -> None:
    full = a_candidate("full", in_flight=InFlight(0, 900, 9))
    ranking = rank(Picture([full], {}), ASK)
    assert (list(ranking.routes), ranking.full) == ([], 1)
    assert order([full, a_candidate("free", 300.0)]) == ["free"]


def test_an_idle_replica_takes_what_is_larger_than_its_bound() -> None:
    assert order([a_candidate("a")], ASK._replace(prompt_tokens=10**6)) == ["a"]


def test_a_faster_replica_may_be_worth_the_way() -> None:
    slow, fast = a_candidate("slow", 1.0, rate=100.0), a_candidate("fast", 90.0, rate=100_000.0)
    assert order([slow, fast])[0] == "fast"


def test_a_session_stays_on_its_seat_unless_that_is_much_slower() -> None:
    ask = ASK._replace(session="s", seat=Seat(ReplicaId("b"), 90, 0.0))
    a, b = a_candidate("a", 1.0), a_candidate("b", 60.0)
    ranking = rank(Picture([a, b], {}), ask)
    assert ranking.routes[0].why == "session rtt=60.0ms queue=0ms prefill=10ms"
    assert ranking.routes[0].uncached_tokens == 10
    busy = b._replace(in_flight=InFlight(500, 0, 1))
    assert order([a, busy], ask)[0] == "a"


def test_who_is_ill_is_left_alone_and_among_too_many_ill_asked_last() -> None:
    four = [a_candidate(name) for name in "abcd"]
    assert set(order(four, a=9.0, b=8.0)) == {"c", "d"}
    assert order(four, a=9.0, b=8.0, c=7.0) == ["d"]
    full = a_candidate("d", in_flight=InFlight(0, 900, 9))
    assert set(order([*four[:3], full], a=9.0, b=8.0, c=7.0)) == {"a", "b", "c"}
    assert set(order(four, a=9.0, b=8.0, c=7.0, d=6.0)) == {"a", "b", "c", "d"}
    assert order(four[:1], a=9.0) == ["a"]


NAMES = st.lists(st.sampled_from([f"r{n}" for n in range(12)]), unique=True, min_size=1)


@settings(deadline=None, max_examples=60)
@given(NAMES, st.text(max_size=20), st.randoms(use_true_random=False))
def test_a_session_goes_the_same_way_from_every_router(
    names: list[str], session: str, chance: object
) -> None:
    ask = ASK._replace(session="t/" + session)
    here = [a_candidate(name) for name in names]
    there = list(reversed(here))
    assert order(here, ask)[0] == order(there, ask._replace(request_id="req-2"))[0]
    first = order(here, ask)[0]
    left = [candidate for candidate in here if candidate.route.replica_id != "r0"]
    if left and first != "r0":
        # Losing another replica moves no session.
        assert order(left, ask)[0] == first


def test_the_rendezvous_follows_the_weights() -> None:
    names = {ReplicaId("small"): 1.0, ReplicaId("large"): 3.0}
    wins = sum(
        max(names, key=lambda r: rendezvous(f"s{n}", r, names[r])) == "large" for n in range(4000)
    )
    assert 0.71 < wins / 4000 < 0.79


def test_sessions_are_bounded_and_end() -> None:
    sessions = Sessions(sessions_max=3, ttl_s=10)
    for n in range(5):
        sessions.sat(f"s{n}", ReplicaId("a"), n, float(n))
    assert len(sessions) == 3
    assert sessions.find("s0", 5.0) is None
    assert sessions.find("s4", 5.0) == Seat(ReplicaId("a"), 4, 4.0)
    assert sessions.find("s4", 15.0) is None


def test_a_round_trip_forgets_a_spike_and_follows_a_step() -> None:
    measured = RoundTripFilter()
    for sample in [10.0, 10.0, 200.0, 10.0]:
        measured.measured(sample)
    assert measured.rtt_ms is not None
    assert abs(measured.rtt_ms - 10.0) < 0.01
    for _ in range(20):
        measured.measured(160.0)
    assert measured.rtt_ms > 150
    assert expected_rtt_ms(None, None) > 100
