"""Tokens in flight of requests whose prompts other replicas read: exact after any events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nodeagent.decide.requests.admission import ReplicaAdmission, TokenReservation


class LegsMachine(RuleBasedStateMachine):
    """Admits requests, moves their prompts away and back, and ends them, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = ReplicaAdmission(10_000)
        self.here: list[TokenReservation] = []
        self.elsewhere: list[TokenReservation] = []
        self.decoding: list[TokenReservation] = []
        self.ended: list[TokenReservation] = []

    def choose(self, data: st.DataObject, of: list[TokenReservation]) -> TokenReservation | None:
        return of.pop(data.draw(st.integers(0, len(of) - 1))) if of else None

    @rule(prompt=st.integers(1, 4000), output=st.integers(0, 4000), cached=st.integers(0, 4000))
    def admit(self, prompt: int, output: int, cached: int) -> None:
        pending = max(0, prompt - cached)
        reservation = self.admission.admit(prompt, output, pending, router="r", prefill_ms=9)
        if reservation is not None:
            self.here.append(reservation)

    @rule(data=st.data())
    def move_away(self, data: st.DataObject) -> None:
        reservation = self.choose(data, self.here)
        if reservation is not None:
            reservation.set_prefill_elsewhere(True)
            reservation.set_prefill_elsewhere(True)
            self.elsewhere.append(reservation)

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        reservation = self.choose(data, self.elsewhere)
        if reservation is not None:
            reservation.set_prefill_elsewhere(False)
            self.here.append(reservation)

    @rule(data=st.data(), from_here=st.booleans(), at_s=st.floats(0, 100))
    def first_token(self, data: st.DataObject, from_here: bool, at_s: float) -> None:
        reservation = self.choose(data, self.here if from_here else self.elsewhere)
        if reservation is not None:
            reservation.first_token(at_s)
            reservation.set_prefill_elsewhere(True)
            self.decoding.append(reservation)

    @rule(data=st.data(), state=st.integers(0, 2))
    def release(self, data: st.DataObject, state: int) -> None:
        reservation = self.choose(data, (self.here, self.elsewhere, self.decoding)[state])
        if reservation is not None:
            reservation.release(1.0)
            self.ended.append(reservation)

    @rule(data=st.data())
    def touch_ended(self, data: st.DataObject) -> None:
        if self.ended:
            reservation = data.draw(st.sampled_from(self.ended))
            reservation.release(2.0)
            reservation.first_token(2.0)
            reservation.set_prefill_elsewhere(True)

    @invariant()
    def is_exact(self) -> None:
        load, reading = self.admission.load(), self.here + self.elsewhere
        everything = reading + self.decoding
        assert load.prefill_tokens == sum(r.prompt_tokens for r in reading)
        assert load.pending_prefill_tokens == sum(r.pending_prefill_tokens for r in self.here)
        assert load.decode_tokens == sum(r.output_tokens for r in everything)
        assert load.running == len(everything)
        assert self.admission.pending_prefill_tokens(50.0) >= 0
        assert self.admission.in_engine == len(everything) - len(self.elsewhere)
        assert self.admission.decoding == len(everything) - len(self.here)


LegsTest = LegsMachine.TestCase
LegsTest.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
