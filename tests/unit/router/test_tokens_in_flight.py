"""Tokens in flight are exact under finish, cancel and crash, in whatever order they come."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from isochrone.wire.headers import Load
from isochrone.wire.ids import ReplicaId
from router.decide.tokens_in_flight import LOAD_FRESH_S, Reservation, TokensInFlight

REPLICAS = [ReplicaId(name) for name in "abc"]
TOKENS = st.integers(0, 5000)


class Ledger(RuleBasedStateMachine):
    """A model: the list of open requests. The ledger must always be its sum."""

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.told: list[ReplicaId] = []
        self.ledger = TokensInFlight(self.told.append)
        self.open: dict[Reservation, list[int]] = {}
        self.released = 0

    @rule(target=reservations, replica=st.sampled_from(REPLICAS), prefill=TOKENS, decode=TOKENS)
    def reserve(self, replica: ReplicaId, prefill: int, decode: int) -> Reservation:
        reservation = self.ledger.reserve(replica, prefill=prefill, decode=decode)
        self.open[reservation] = [prefill, decode]
        return reservation

    @rule(reservation=reservations)
    def first_token(self, reservation: Reservation) -> None:
        reservation.first_token()
        if reservation in self.open:
            prefill, decode = self.open[reservation]
            self.open[reservation] = [0, prefill + decode]

    @rule(reservation=reservations)
    def end(self, reservation: Reservation) -> None:
        was_open = self.open.pop(reservation, None) is not None
        assert reservation.release() is was_open
        self.released += was_open
        assert not reservation.is_open

    @invariant()
    def the_sums_are_right(self) -> None:
        for replica in REPLICAS:
            mine = [sums for one, sums in self.open.items() if one.replica_id == replica]
            in_flight = self.ledger.at(replica, 0.0)
            assert in_flight.prefill_tokens == sum(prefill for prefill, _ in mine)
            assert in_flight.decode_tokens == sum(decode for _, decode in mine)
            assert in_flight.requests == len(mine)
        assert self.ledger.requests == len(self.open)
        assert len(self.told) == self.released


Ledger.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedger = Ledger.TestCase


def test_what_others_sent_is_believed_for_a_while() -> None:
    ledger = TokensInFlight()
    held = ledger.reserve(REPLICAS[0], prefill=100, decode=50)
    ledger.hear(REPLICAS[0], Load(300, 50, 2, 0), 10.0)
    assert ledger.at(REPLICAS[0], 10.0).queued_tokens == 300
    assert ledger.at(REPLICAS[0], 10.0).tokens == 350
    assert ledger.at(REPLICAS[0], 10.0 + LOAD_FRESH_S / 2).queued_tokens == 200
    held.release()
    assert ledger.at(REPLICAS[0], 10.0 + LOAD_FRESH_S).tokens == 0
