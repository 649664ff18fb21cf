"""Tokens in flight are exact under finish, cancel and crash, in whatever order they come."""

from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from isochrone.wire.ids import ReplicaId
from router.decide.other_routers_load import LOAD_FRESH_S
from router.decide.tokens_in_flight import InFlightLedger, Reservation

REPLICAS = [ReplicaId(name) for name in "abc"]
TOKENS = st.integers(0, 5000)


class Ledger(RuleBasedStateMachine):
    """A model: the list of open requests. The ledger must always be its sum.

    A finish, a cancel and a crash are all one release; a lost node is a table that names it no more
    while its requests still unwind.
    """

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.told: list[ReplicaId] = []
        self.ledger = InFlightLedger(self.told.append)
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
        reservation.first_token(self.now_s if is_timed else None)
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
    def pass_on(self, reservation: Reservation, replica: ReplicaId, prefill: int) -> Reservation:
        """A sibling took it: what was booked at one is booked at the other, and read there."""
        if reservation not in self.open:
            return reservation
        output = reservation.output_tokens
        self.end(reservation)
        passed = cast(Reservation, self.reserve(replica, prefill, output, True))
        self.first_token(passed, True)
        return passed

    @rule(replica=st.sampled_from(REPLICAS), prefill=TOKENS, decode=TOKENS, age_s=st.floats(0, 20))
    def hear(self, replica: ReplicaId, prefill: int, decode: int, age_s: float) -> None:
        self.ledger.hear(replica, prefill, decode, self.now_s - age_s)

    @rule(replica=st.sampled_from(REPLICAS))
    def lose(self, replica: ReplicaId) -> None:
        self.ledger.forget({replica})

    @rule(by_s=st.floats(0, 5))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s

    @invariant()
    def the_sums_are_right(self) -> None:
        for replica in REPLICAS:
            mine = [sums for one, sums in self.open.items() if one.replica_id == replica]
            in_flight = self.ledger.at(replica, self.now_s)
            assert in_flight.prefill_tokens == sum(prefill for prefill, _ in mine)
            assert in_flight.decode_tokens == sum(decode for _, decode in mine)
            assert in_flight.requests == len(mine)
            assert in_flight.others_prefill_tokens >= 0
            assert in_flight.others_decode_tokens >= 0
            line = self.ledger.line(replica)
            assert line.behind_first_ms >= 0
            assert line.outputs == sum(
                one.output_tokens for one in self.open if one.replica_id == replica
            )
        assert self.ledger.requests == len(self.open)
        assert len(self.told) == self.released


Ledger.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedger = Ledger.TestCase


def test_what_others_sent_is_believed_for_a_while() -> None:
    ledger = InFlightLedger()
    held = ledger.reserve(REPLICAS[0], prefill=100, decode=50)
    ledger.hear(REPLICAS[0], 300, 50, 10.0)
    assert ledger.at(REPLICAS[0], 10.0).others_prefill_tokens == 200
    assert ledger.at(REPLICAS[0], 10.0).tokens == 350
    assert ledger.at(REPLICAS[0], 10.0 + 1.5 * LOAD_FRESH_S).others_prefill_tokens == 100
    held.release()
    assert ledger.at(REPLICAS[0], 10.0 + 2 * LOAD_FRESH_S).tokens == 0


def test_nothing_is_remembered_of_who_was_let_go_in_mid_answer() -> None:
    ledger, replica = InFlightLedger(), REPLICAS[0]
    held = [ledger.reserve(replica, prefill=100, decode=50) for _ in range(2)]
    line = ledger.line(replica)
    ledger.forget({replica})
    held[0].release()
    assert ledger.line(replica) is line, "it answers still"
    held[1].release()
    assert ledger.line(replica) is not line
    # One that a table names again is remembered again.
    late = ledger.reserve(replica, prefill=100, decode=50)
    ledger.forget({replica})
    again = ledger.reserve(replica, prefill=100, decode=50)
    line = ledger.line(replica)
    for each in (late, again):
        each.release()
    assert ledger.line(replica) is line


def test_an_old_word_is_held_against_what_was_ours_then() -> None:
    ledger, replica = InFlightLedger(), REPLICAS[0]
    ledger.reserve(replica, prefill=100, decode=0, arrives_s=1.0)
    ledger.reserve(replica, prefill=400, decode=0, arrives_s=2.0)
    # At 1.5 s it had 130 tokens: our 100 and 30 of others. What we sent since is not theirs.
    ledger.hear(replica, 130, 0, 1.5)
    assert ledger.at(replica, 3.0).others_prefill_tokens == 30
    # A word older than the last changes nothing.
    ledger.hear(replica, 9000, 0, 1.2)
    assert ledger.at(replica, 3.0).others_prefill_tokens == 30


def test_a_word_on_others_alone_is_taken_as_it_is() -> None:
    ledger, replica = InFlightLedger(), REPLICAS[0]
    ledger.reserve(replica, prefill=100, decode=0, arrives_s=1.0)
    ledger.hear_others(replica, 30, 5, 1.5)
    told = ledger.at(replica, 1.5)
    assert (told.others_prefill_tokens, told.others_decode_tokens) == (30, 5)


def test_the_older_the_words_the_nearer_to_the_usual() -> None:
    fresh, stale = InFlightLedger(), InFlightLedger()
    for n in range(400):
        fresh.hear(REPLICAS[0], 1000 if n % 100 > 50 else 0, 0, 0.1 * n)
        stale.hear(REPLICAS[0], 1000 if n % 2 else 0, 0, float(n))
    # Swings that last are believed, swings that are over by the next word are not.
    assert fresh.at(REPLICAS[0], 40.0).others_prefill_tokens > 850
    assert 300 < stale.at(REPLICAS[0], 400.0).others_prefill_tokens < 700


def test_a_queue_empties_by_the_clock_but_not_before_it_is_read() -> None:
    ledger, replica = InFlightLedger(), REPLICAS[0]
    first = ledger.reserve(replica, prefill=10, decode=0, work_ms=1000, arrives_s=0.0)
    second = ledger.reserve(replica, prefill=20, decode=0, work_ms=2000, arrives_s=0.1)
    line = ledger.line(replica)
    assert line.free_at_s == 3.0
    assert line.behind_first_ms == 2000
    # The first took twice as long as thought: the second only begins now.
    first.first_token(2.0)
    assert line.free_at_s == 4.0
    second.release()
    assert line.free_at_s == 2.0
    assert line.behind_first_ms == 0
