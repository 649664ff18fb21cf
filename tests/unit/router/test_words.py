"""What a router takes from a replica's word, whoever asked for it."""

from isochrone.wire.headers import ReportedLoad
from isochrone.wire.ids import NodeId, PopId, ReplicaId
from router.decide.health import FAILURES_MAX
from router.fleet import Fleet
from tests.unit.router.test_slow_start import NEW, OLD, D, a_route, a_table

RTT_MS = 40.0


class Bench:
    """A router before two replicas as far as one another, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.fleet = Fleet(PopId("ams"), lambda: self.now_s)
        self.fleet.adopt(a_table(OLD, NEW))
        for name in (OLD, NEW):
            self.fleet.measured(NodeId(f"n-{name}"), RTT_MS)

    def others(self) -> int:
        return self.fleet.in_flight.at(OLD, self.now_s).others_prefill_tokens


def test_a_ping_tells_of_a_replica_that_was_never_asked() -> None:
    bench = Bench()
    loads = {
        OLD: ReportedLoad(3000, 10, 2, 0, 2500),
        ReplicaId("of another table"): ReportedLoad(1, 1, 1, 0),
    }
    bench.fleet.pinged(NodeId(f"n-{OLD}"), RTT_MS, loads)
    assert bench.others() == 2500
    picture = bench.fleet.view(D)
    least_ms = {name: picture.times[picture.slots[name]][1] for name in (OLD, NEW)}
    assert least_ms[OLD] > least_ms[NEW] + 2000


def test_who_is_turned_away_does_not_take_others_prompts_for_its_own() -> None:
    bench = Bench()
    held = bench.fleet.reserve(a_route(OLD), prefill=400, decode=10)
    bench.now_s += RTT_MS / 1000
    # There 500 tokens waited, none of them ours: it was refused on arrival.
    bench.fleet.heard(a_route(OLD), ReportedLoad(500, 0, 1, 0, 500), "queued", held)
    assert bench.others() == 500
    assert bench.fleet.in_flight.requests == 0


def test_whose_prompt_was_read_does_not_count_it_either() -> None:
    bench = Bench()
    first = bench.fleet.reserve(a_route(OLD), prefill=400, decode=10)
    bench.fleet.reserve(a_route(OLD), prefill=100, decode=10)
    bench.now_s += 1.0
    # The first was read. Behind it stand our second and 500 tokens of others.
    bench.fleet.heard(a_route(OLD), ReportedLoad(600, 20, 3, 0, 600), "", first)
    assert bench.others() == 500
    assert bench.fleet.in_flight.requests == 2
    assert bench.fleet.in_flight.at(OLD, bench.now_s).prefill_tokens == 100


def test_nothing_is_kept_of_who_fails_or_refuses_when_no_table_names_it_any_more() -> None:
    bench = Bench()
    held = bench.fleet.reserve(a_route(OLD), prefill=400, decode=10)
    bench.fleet.adopt(a_table(NEW))
    bench.fleet.heard(a_route(OLD), ReportedLoad(500, 0, 1, 0, 500), "draining", held)
    for _ in range(FAILURES_MAX):
        assert bench.fleet.failed(a_route(OLD)) == ""
    assert not bench.fleet.health.ejected()
    assert bench.fleet.in_flight.line(OLD) is not bench.fleet.in_flight.line(OLD)
    bench.fleet.adopt(a_table(OLD, NEW))
    assert OLD in bench.fleet.answering()
