"""What the load reports of replicas teach a router."""

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import NodeId, PopId, ReplicaId
from router.decide.caches.prefix_index import PrefixKeys, prefix_keys
from router.decide.choice.ranking import RouteQuery, rank
from router.decide.liveness.outlier_ejection import FAILURES_MAX
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState
from tests.unit.router.test_slow_start import NEW, OLD, D, a_route, a_table

RTT_MS = 40.0


class Bench:
    """A router with two equally distant replicas, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.fleet = FleetState(PopId("ams"), lambda: self.now_s)
        self.attempts = AttemptFeedback(self.fleet)
        self.probes = ProbeFeedback(self.fleet)
        self.fleet.adopt(a_table(OLD, NEW))
        for name in (OLD, NEW):
            self.probes.record_round_trip(NodeId(f"n-{name}"), RTT_MS)

    def others(self) -> int:
        return self.fleet.in_flight.tokens_at(OLD, self.now_s).others_prefill_tokens


def test_a_ping_reports_the_load_of_a_replica_without_requests() -> None:
    bench = Bench()
    loads = {
        OLD: ReportedLoad(3000, 10, 2, 0, 2500),
        ReplicaId("of another table"): ReportedLoad(1, 1, 1, 0),
    }
    bench.probes.record_ping(NodeId(f"n-{OLD}"), RTT_MS, loads)
    assert bench.others() == 2500
    snapshot = bench.fleet.snapshot(D, bench.fleet.clock())
    wait_ms = {name: snapshot.estimates[snapshot.slots[name]].wait_min_ms for name in (OLD, NEW)}
    assert wait_ms[OLD] > wait_ms[NEW] + 2000


def test_a_ping_reports_the_sequences_of_an_engine_and_requests_of_other_routers() -> None:
    bench = Bench()
    held = bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=400, decode=10)
    load = ReportedLoad(3000, 10, 5, 0, 2500, sequences_max=16)
    bench.probes.record_ping(NodeId(f"n-{OLD}"), RTT_MS, {OLD: load})
    assert bench.fleet.in_flight.load_of(OLD).others_requests == 5, "ours was not there yet"
    bench.now_s += RTT_MS / 1000
    bench.probes.record_ping(NodeId(f"n-{OLD}"), RTT_MS, {OLD: load})
    found = bench.fleet.in_flight.load_of(OLD)
    assert (found.sequences_max, found.requests, found.others_requests) == (16, 1, 4)
    held.release(bench.now_s)
    # What an answer says of the load leaves them as they are.
    bench.attempts.record_answer_head(a_route(OLD), ReportedLoad(0, 0, 4, 0, 0))
    found = bench.fleet.in_flight.load_of(OLD)
    assert (found.sequences_max, found.requests, found.others_requests) == (16, 0, 4)


def wait_ms(bench: Bench, name: ReplicaId) -> float:
    estimate = bench.fleet.snapshot(D, bench.fleet.clock()).estimates[
        bench.fleet.snapshot(D, bench.fleet.clock()).slots[name]
    ]
    return estimate.wait_min_ms - estimate.base_ms


def test_a_request_waits_for_a_sequence_where_all_are_taken() -> None:
    bench = Bench()
    load = ReportedLoad(0, 0, 3, 0, 0, sequences_max=4, sequence_ms=500)
    bench.probes.record_ping(NodeId(f"n-{OLD}"), RTT_MS, {OLD: load})
    assert wait_ms(bench, OLD) == 0.0
    # Requests of this router count at once.
    held = [
        bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=0, decode=10)
        for _ in range(3)
    ]
    assert wait_ms(bench, OLD) == 3 * 500.0
    assert wait_ms(bench, NEW) == 0.0
    ranked = rank(bench.fleet.snapshot(D, bench.fleet.clock()), RouteQuery("a-request", 100, 10))
    assert ranked[0].route.replica_id == NEW
    held[0].release(bench.now_s)
    assert wait_ms(bench, OLD) == 2 * 500.0


def test_items_of_batches_keep_no_request_waiting() -> None:
    bench = Bench()
    own = bench.attempts.reserve(
        a_route(OLD), bench.fleet.clock(), prefill=0, decode=10, is_batch_item=True
    )
    bench.now_s += RTT_MS / 1000
    load = ReportedLoad(0, 0, 6, 0, 0, sequences_max=4, sequence_ms=500, batch_items=3)
    bench.probes.record_ping(NodeId(f"n-{OLD}"), RTT_MS, {OLD: load})
    found = bench.fleet.in_flight.load_of(OLD)
    assert (found.requests, found.batch_items) == (1, 1)
    assert (found.others_requests, found.others_batch_items) == (5, 2)
    assert found.clients_requests == 3
    assert wait_ms(bench, OLD) == 0.0
    assert not bench.fleet.in_flight.full_batches([OLD, NEW])
    bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=0, decode=10)
    assert wait_ms(bench, OLD) == 500.0
    assert bench.fleet.in_flight.full_batches([OLD, NEW]) == {OLD}
    own.release(bench.now_s)
    assert bench.fleet.in_flight.load_of(OLD).batch_items == 0


def test_the_load_in_a_refusal_is_not_taken_for_our_own() -> None:
    bench = Bench()
    held = bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=400, decode=10)
    bench.now_s += RTT_MS / 1000
    # 500 tokens waited there, none of them ours: the request was refused on arrival.
    bench.attempts.record_answer_head(a_route(OLD), ReportedLoad(500, 0, 1, 0, 500), "queued", held)
    assert bench.others() == 500
    assert bench.fleet.in_flight.requests == 0


def test_the_load_in_an_answer_does_not_include_the_answered_prompt() -> None:
    bench = Bench()
    first = bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=400, decode=10)
    bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=100, decode=10)
    bench.now_s += 1.0
    # The first was read. Our second and 500 tokens of others are pending.
    bench.attempts.record_answer_head(a_route(OLD), ReportedLoad(600, 20, 3, 0, 600), "", first)
    assert bench.others() == 500
    assert bench.fleet.in_flight.requests == 2
    assert bench.fleet.in_flight.tokens_at(OLD, bench.now_s).prefill_tokens == 100


def test_nothing_is_kept_of_a_replica_that_left_the_table() -> None:
    bench = Bench()
    held = bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=400, decode=10)
    bench.fleet.adopt(a_table(NEW))
    bench.attempts.record_answer_head(
        a_route(OLD), ReportedLoad(500, 0, 1, 0, 500), "draining", held
    )
    for _ in range(FAILURES_MAX):
        assert bench.attempts.record_failure(a_route(OLD)) == ""
    assert not bench.fleet.health.unhealthy()
    assert bench.fleet.in_flight.load_of(OLD) is not bench.fleet.in_flight.load_of(OLD)
    bench.fleet.adopt(a_table(OLD, NEW))
    assert bench.fleet.answering_test()(a_route(OLD))


def share_cached(bench: Bench, keys: PrefixKeys) -> float:
    routing = bench.fleet.routing(D)
    return routing.prefix_matches(keys).share_at(routing.slot_of(OLD))


def test_reports_say_which_prompts_are_no_longer_cached() -> None:
    bench = Bench()
    old, new = (prefix_keys(bytes([n]) * 1024, 1) for n in (1, 2))
    for keys in (old, new):
        snapshot = bench.fleet.snapshot(D, bench.fleet.clock())
        query = RouteQuery("q", 300, 10, "", None, bench.fleet.routing(D).prefix_matches(keys))
        ranked = rank(snapshot, query).route_to(OLD)
        assert ranked is not None
        bench.attempts.record_sent(ranked, bench.fleet.clock(), keys)
        bench.now_s += 100.0
    assert share_cached(bench, old) == share_cached(bench, new) == 1.0
    # The old one was sent 200 s ago, the new one 100.
    reaches = ReportedLoad(0, 0, 0, 0, 0, cache_age_ms=201_000)
    bench.probes.record_ping(NodeId(f"n-{OLD}"), RTT_MS, {OLD: reaches})
    assert share_cached(bench, old) == share_cached(bench, new) == 1.0
    reaches = ReportedLoad(0, 0, 0, 0, 0, cache_age_ms=150_000)
    bench.probes.record_relayed(NodeId(f"n-{OLD}"), 1.0, {OLD: reaches})
    assert share_cached(bench, old) == 0.0
    assert share_cached(bench, new) == 1.0
    # A restarted engine has nothing from before its start.
    reaches = ReportedLoad(0, 0, 0, 0, 0, cache_age_ms=3_000)
    bench.attempts.record_answer_head(a_route(OLD), reaches)
    assert share_cached(bench, new) == 0.0
