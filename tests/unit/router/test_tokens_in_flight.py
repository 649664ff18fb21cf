"""Tokens in flight stay exact under finish, cancellation and crash, in any order."""

from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import ReplicaId
from router.decide.replicas.other_routers_load import LOAD_FRESH_S
from router.decide.replicas.tokens_in_flight import InFlightLedger, Reservation

REPLICAS = [ReplicaId(name) for name in "abc"]
TOKENS = st.integers(0, 5000)


class Ledger(RuleBasedStateMachine):
    """A model of the ledger: the open requests. The ledger must always be their sum.

    A finish, a cancellation and a crash are all one release. A lost node leaves the route table
    while its requests still unwind.
    """

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.notified: list[ReplicaId] = []
        self.ledger = InFlightLedger(lambda: self.now_s, self.notified.append)
        self.open: dict[Reservation, list[int]] = {}
        self.released = 0
        self.now_s = 100.0

    @rule(
        target=reservations,
        replica=st.sampled_from(REPLICAS),
        prefill=TOKENS,
        decode=TOKENS,
        is_timed=st.booleans(),
    )
    def reserve(self, replica: ReplicaId, prefill: int, decode: int, is_timed: bool) -> Reservation:
        reservation = self.ledger.reserve(
            replica,
            prefill=prefill,
            decode=decode,
            work_ms=float(prefill),
            arrives_s=self.now_s if is_timed else None,
        )
        self.open[reservation] = [prefill, decode]
        return reservation

    @rule(reservation=reservations, is_timed=st.booleans())
    def first_token(self, reservation: Reservation, is_timed: bool) -> None:
        reservation.finish_prefill(self.now_s if is_timed else None)
        if reservation in self.open:
            prefill, decode = self.open[reservation]
            self.open[reservation] = [0, prefill + decode]

    @rule(reservation=reservations)
    def end(self, reservation: Reservation) -> None:
        was_open = self.open.pop(reservation, None) is not None
        assert reservation.release() is was_open
        self.released += was_open

    @rule(
        target=reservations,
        reservation=reservations,
        replica=st.sampled_from(REPLICAS),
        prefill=TOKENS,
    )
    def hand_off(self, reservation: Reservation, replica: ReplicaId, prefill: int) -> Reservation:
        """A peer took it: move the reservation there, with its prompt read."""
        if reservation not in self.open:
            return reservation
        output = reservation.output_tokens
        self.end(reservation)
        handed_off = cast(Reservation, self.reserve(replica, prefill, output, True))
        self.first_token(handed_off, True)
        return handed_off

    @rule(replica=st.sampled_from(REPLICAS), prefill=TOKENS, decode=TOKENS, age_s=st.floats(0, 20))
    def report(self, replica: ReplicaId, prefill: int, decode: int, age_s: float) -> None:
        self.ledger.record_report(replica, prefill, decode, self.now_s - age_s)

    @rule(replica=st.sampled_from(REPLICAS))
    def remove(self, replica: ReplicaId) -> None:
        self.ledger.remove_replicas({replica})

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def the_sums_are_right(self) -> None:
        for replica in REPLICAS:
            here = [sums for held, sums in self.open.items() if held.replica_id == replica]
            in_flight = self.ledger.tokens_at(replica, self.now_s)
            assert in_flight.prefill_tokens == sum(prefill for prefill, _ in here)
            assert in_flight.decode_tokens == sum(decode for _, decode in here)
            assert in_flight.requests == len(here)
            assert in_flight.others_prefill_tokens >= 0
            assert in_flight.others_decode_tokens >= 0
            load = self.ledger.load_of(replica)
            assert load.queued_ms >= 0
            assert load.output_tokens == sum(
                held.output_tokens for held in self.open if held.replica_id == replica
            )
        assert self.ledger.requests == len(self.open)
        assert len(self.notified) == self.released


Ledger.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedger = Ledger.TestCase


def test_the_load_of_other_routers_fades_with_its_report() -> None:
    ledger = InFlightLedger(lambda: 0.0)
    held = ledger.reserve(REPLICAS[0], prefill=100, decode=50)
    ledger.record_report(REPLICAS[0], 300, 50, 10.0)
    assert ledger.tokens_at(REPLICAS[0], 10.0).others_prefill_tokens == 200
    assert ledger.tokens_at(REPLICAS[0], 10.0).tokens == 350
    assert ledger.tokens_at(REPLICAS[0], 10.0 + 1.5 * LOAD_FRESH_S).others_prefill_tokens == 100
    held.release()
    assert ledger.tokens_at(REPLICAS[0], 10.0 + 2 * LOAD_FRESH_S).tokens == 0


def test_a_replica_removed_during_an_answer_is_dropped_after_it() -> None:
    ledger, replica = InFlightLedger(lambda: 0.0), REPLICAS[0]
    held = [ledger.reserve(replica, prefill=100, decode=50) for _ in range(2)]
    load = ledger.load_of(replica)
    ledger.remove_replicas({replica})
    held[0].release()
    assert ledger.load_of(replica) is load, "it still answers"
    held[1].release()
    assert ledger.load_of(replica) is not load
    # A replica that a table has again is kept again.
    late = ledger.reserve(replica, prefill=100, decode=50)
    ledger.remove_replicas({replica})
    again = ledger.reserve(replica, prefill=100, decode=50)
    load = ledger.load_of(replica)
    for each in (late, again):
        each.release()
    assert ledger.load_of(replica) is load


def test_a_report_is_compared_with_our_tokens_at_its_time() -> None:
    ledger, replica = InFlightLedger(lambda: 0.0), REPLICAS[0]
    ledger.reserve(replica, prefill=100, decode=0, arrives_s=1.0)
    ledger.reserve(replica, prefill=400, decode=0, arrives_s=2.0)
    # At 1.5 s it had 130 tokens: our 100 and 30 of others. What we sent later was not included.
    ledger.record_report(replica, 130, 0, 1.5)
    assert ledger.tokens_at(replica, 3.0).others_prefill_tokens == 30
    # An older report changes nothing.
    ledger.record_report(replica, 9000, 0, 1.2)
    assert ledger.tokens_at(replica, 3.0).others_prefill_tokens == 30


def test_a_report_of_before_our_requests_ended_does_not_count_them_as_those_of_others() -> None:
    now_s = 1.0
    ledger, replica = InFlightLedger(lambda: now_s), REPLICAS[0]
    held = [ledger.reserve(replica, prefill=0, decode=50, arrives_s=1.0) for _ in range(3)]
    now_s = 2.0
    for reservation in held:
        reservation.release()
    report = ReportedLoad(0, 200, running=4, waiting=0, sequences_max=2, sequence_ms=100)
    ledger.record_report(replica, 0, 200, 1.5)
    ledger.record_sequences(replica, report, 1.5)
    assert ledger.tokens_at(replica, 1.5).others_decode_tokens == 50
    assert ledger.load_of(replica).others_requests == 1
    assert ledger.load_of(replica).sequence_wait_ms == 0.0
    ledger.record_sequences(replica, report, 2.5)
    assert ledger.load_of(replica).others_requests == 4


def test_a_report_of_the_others_load_alone_is_taken_as_it_is() -> None:
    ledger, replica = InFlightLedger(lambda: 0.0), REPLICAS[0]
    ledger.reserve(replica, prefill=100, decode=0, arrives_s=1.0)
    ledger.record_other_routers(replica, 30, 5, 1.5)
    tokens = ledger.tokens_at(replica, 1.5)
    assert (tokens.others_prefill_tokens, tokens.others_decode_tokens) == (30, 5)


def test_an_old_report_moves_towards_the_average() -> None:
    fresh, stale = InFlightLedger(lambda: 0.0), InFlightLedger(lambda: 0.0)
    for n in range(400):
        fresh.record_report(REPLICAS[0], 1000 if n % 100 > 50 else 0, 0, 0.1 * n)
        stale.record_report(REPLICAS[0], 1000 if n % 2 else 0, 0, float(n))
    # A deviation that lasts is believed; one that is over by the next report is not.
    assert fresh.tokens_at(REPLICAS[0], 40.0).others_prefill_tokens > 850
    assert 300 < stale.tokens_at(REPLICAS[0], 400.0).others_prefill_tokens < 700


def test_a_queue_shrinks_with_time_but_not_before_the_prompt_is_read() -> None:
    ledger, replica = InFlightLedger(lambda: 0.0), REPLICAS[0]
    first = ledger.reserve(replica, prefill=10, decode=0, work_ms=1000, arrives_s=0.0)
    second = ledger.reserve(replica, prefill=20, decode=0, work_ms=2000, arrives_s=0.1)
    load = ledger.load_of(replica)
    assert load.busy_until_s == 3.0
    assert load.queued_ms == 2000
    # The first took twice as long as predicted: the second begins only now.
    first.finish_prefill(2.0)
    assert load.busy_until_s == 4.0
    second.release()
    assert load.busy_until_s == 2.0
    assert load.queued_ms == 0
