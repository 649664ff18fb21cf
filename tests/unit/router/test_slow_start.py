"""Slow start, in the ranking of a whole router."""

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
from isochrone.wire.peers.routes import DeploymentEntry, Route, RouteTable
from router.decide.choice.ranking import RouteQuery, rank
from router.decide.liveness.outlier_ejection import FAILURES_MAX
from router.decide.liveness.slow_start import SHARE_FIRST, SLOW_START_S, SlowStart, is_held_back
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState

D = DeploymentId("d")
OLD, NEW = ReplicaId("old"), ReplicaId("new")
REQUESTS = 400


def a_route(name: ReplicaId) -> Route:
    return Route(
        replica_id=name,
        deployment_id=D,
        version=1,
        node_id=NodeId(f"n-{name}"),
        pop=PopId("ams"),
        address="x:1",
        tokens_in_flight_max=10_000,
        prefill_tokens_per_s=1000.0,
    )


def a_table(*names: ReplicaId) -> RouteTable:
    entry = DeploymentEntry(deployment_id=D, name="m", model_id=ModelId("m"), context_tokens=4096)
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        deployments=(entry,),
        routes=tuple(a_route(name) for name in names),
    )


class Bench:
    """A router with two replicas, of which `new` is much nearer, and its clock."""

    def __init__(self, *names: ReplicaId) -> None:
        self.now_s = 1000.0
        self.fleet = FleetState(PopId("ams"), lambda: self.now_s)
        self.attempts = AttemptFeedback(self.fleet)
        self.probes = ProbeFeedback(self.fleet)
        self.fleet.adopt(a_table(*names))
        for name, rtt_ms in ((OLD, 80.0), (NEW, 1.0)):
            self.probes.record_round_trip(NodeId(f"n-{name}"), rtt_ms)

    def chosen(self, request_id: str, session: str = "") -> ReplicaId:
        query = RouteQuery(request_id, prompt_tokens=100, output_tokens=100, session=session)
        first: ReplicaId = rank(self.fleet.snapshot(D, self.fleet.clock()), query)[
            0
        ].route.replica_id
        return first

    def share_of_new(self, *, idle: bool = False) -> float:
        """Return the share of requests that go to `new` while it is busy, or idle."""
        held = (
            None
            if idle
            else self.attempts.reserve(a_route(NEW), self.fleet.clock(), prefill=1, decode=1)
        )
        share = sum(self.chosen(f"q{n}") == NEW for n in range(REQUESTS)) / REQUESTS
        if held is not None:
            held.release()
        return share


def test_a_new_replica_takes_a_growing_share() -> None:
    bench = Bench(OLD)
    bench.fleet.adopt(a_table(OLD, NEW))
    bench.probes.record_round_trip(NodeId("n-new"), 1.0)
    assert bench.share_of_new(idle=True) == 1.0, "a replica that seems idle may take any request"
    began_s, shares = bench.now_s, []
    for part in (0.0, 0.25, 0.5, 0.75):
        bench.now_s = began_s + part * SLOW_START_S
        shares.append(bench.share_of_new())
        assert abs(shares[-1] - (SHARE_FIRST + (1 - SHARE_FIRST) * part)) < 0.08
    assert shares == sorted(shares)
    bench.now_s = began_s + SLOW_START_S
    assert bench.share_of_new() == 1.0


def test_a_session_once_admitted_stays_admitted() -> None:
    slow = SlowStart()
    slow.begin((NEW,), 0.0)
    admitted: set[str] = set()
    for tick in range(12):
        share = slow.shares(tick * SLOW_START_S / 10).get(NEW, 1.0)
        here = {f"s{n}" for n in range(100) if not is_held_back(NEW, share, f"s{n}")}
        assert admitted <= here
        admitted = here
    assert len(admitted) == 100
    assert len(slow) == 0


def test_all_requests_of_a_session_are_treated_alike() -> None:
    bench = Bench(OLD)
    bench.fleet.adopt(a_table(OLD, NEW))
    bench.probes.record_round_trip(NodeId("n-new"), 1.0)
    bench.attempts.reserve(a_route(NEW), bench.fleet.clock(), prefill=1, decode=1)
    for session in ("s1", "s2", "s3", "s4"):
        assert len({bench.chosen(f"q{n}", session) for n in range(20)}) == 1


def test_a_router_that_starts_puts_no_replica_into_slow_start() -> None:
    bench = Bench(OLD, NEW)
    assert bench.share_of_new() == 1.0


def test_a_replica_that_becomes_healthy_takes_a_growing_share() -> None:
    bench = Bench(OLD, NEW)
    for _ in range(FAILURES_MAX):
        bench.attempts.record_failure(a_route(NEW))
    assert bench.share_of_new() == 0.0
    bench.now_s += 5.0
    bench.attempts.reserve(a_route(NEW), bench.fleet.clock(), prefill=1, decode=1).release()
    bench.attempts.record_success(a_route(NEW))
    assert abs(bench.share_of_new() - SHARE_FIRST) < 0.06
    # A second good answer does not start slow start again.
    bench.now_s += SLOW_START_S / 2
    bench.attempts.record_success(a_route(NEW))
    assert 0.4 < bench.share_of_new() < 0.7


def test_all_requests_go_to_a_starting_replica_if_no_other_has_capacity() -> None:
    bench = Bench(OLD)
    bench.fleet.adopt(a_table(OLD, NEW))
    held = bench.attempts.reserve(a_route(OLD), bench.fleet.clock(), prefill=5_000, decode=4_950)
    assert bench.share_of_new() == 1.0
    held.release()
    assert bench.share_of_new() < 0.3


def test_a_replica_that_left_the_table_is_dropped() -> None:
    slow = SlowStart()
    slow.begin((NEW, OLD), 0.0)
    slow.remove_replicas({NEW})
    assert set(slow.shares(1.0)) == {OLD}
