"""How much a key may ask, by rows and against a model that remembers everything."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.keys import format_key
from isochrone.wire.model import Price
from isochrone.wire.routes import KeyEntry, KeyLimits
from router.decide.admit import authenticate
from router.decide.limits import DAY_S, Entry, Gate, Limited, duration

NOON = 10 * DAY_S + DAY_S / 2


def a_key(name: str = "k", spent_until: float = 0.0, **limits: float) -> KeyEntry:
    return KeyEntry(
        key_id=KeyId(name),
        secret_sha256="",
        tenant_id=TenantId("t"),
        limits=KeyLimits(**limits),  # type: ignore[arg-type]
        spent_until=spent_until,
    )


def refused(ask: Callable[[], Entry]) -> Limited:
    with pytest.raises(Limited) as caught:
        ask()
    return caught.value


def left(entry: Entry, name: str, now_s: float = 0.0) -> int:
    told = dict(line.split(": ") for line in entry.lines(now_s).splitlines())
    return int(told[f"x-ratelimit-remaining-{name}"])


def test_a_limited_key_is_told_when_to_come_back_and_is_let_in_then() -> None:
    gate, key = Gate(), a_key(requests_per_min=6, tokens_per_min=600)
    for _ in range(6):
        gate.enter(key, 10, 0.0, NOON).leave(10, 0.0)
    error = refused(lambda: gate.enter(key, 10, 0.0, NOON))
    assert (error.limit, error.code, error.meaning.number) == (
        "requests",
        ErrorCode.RATE_LIMITED,
        10429,
    )
    assert error.retry_after_s == pytest.approx(10.0)
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.message.endswith("6 requests a minute, the key's limit; try again in 10 s")
    assert left(gate.enter(key, 10, 10.0, NOON), "requests", 10.0) == 0


def test_of_two_limits_the_one_that_holds_longer_is_told() -> None:
    gate, key = Gate(), a_key(requests_per_min=60, tokens_per_min=600, concurrency=1)
    held = gate.enter(key, 600, 0.0, NOON)
    error = refused(lambda: gate.enter(key, 300, 0.0, NOON))
    assert (error.limit, error.retry_after_s) == ("tokens", pytest.approx(30.0))
    error = refused(lambda: gate.enter(key, 1, 60.0, NOON))
    assert (error.limit, error.retry_after_s) == ("concurrency", 1.0)
    held.leave(600, 60.0)
    gate.enter(key, 1, 60.0, NOON)


def test_tokens_are_settled_by_what_was_used_once() -> None:
    gate, key = Gate(), a_key(tokens_per_min=600)
    entry = gate.enter(key, 500, 0.0, NOON)
    assert refused(lambda: gate.enter(key, 200, 0.0, NOON)).limit == "tokens"
    entry.leave(100, 0.0)
    entry.leave(0, 0.0)
    assert left(gate.enter(key, 200, 0.0, NOON), "tokens") == 300
    # Larger than the whole limit: a full meter lets it in, and it is paid off afterwards.
    gate.enter(key, 6000, 100.0, NOON)
    again_s = refused(lambda: gate.enter(key, 1, 100.0, NOON)).retry_after_s
    assert again_s is not None and again_s > 500


def test_what_failed_gives_its_tokens_back_and_not_its_request() -> None:
    gate, key = Gate(), a_key(requests_per_min=10, tokens_per_min=1000)
    gate.enter(key, 900, 0.0, NOON).leave(0, 0.0)
    entry = gate.enter(key, 0, 0.0, NOON)
    assert (left(entry, "requests"), left(entry, "tokens")) == (8, 1000)


def test_a_limit_set_later_owes_nothing_for_before() -> None:
    gate = Gate()
    held = gate.enter(a_key(), 10**6, 0.0, NOON)
    limited = a_key(requests_per_min=2, tokens_per_min=100, concurrency=2)
    entry = gate.enter(limited, 60, 0.0, NOON)
    assert (left(entry, "requests"), left(entry, "tokens")) == (1, 40)
    assert refused(lambda: gate.enter(limited, 1, 0.0, NOON)).limit == "concurrency"
    held.leave(5, 0.0)
    assert left(gate.enter(limited, 1, 0.0, NOON), "tokens") == 39


def test_the_same_limits_in_a_new_table_keep_what_was_drawn() -> None:
    gate = Gate()
    entry = gate.enter(a_key(tokens_per_min=600), 500, 0.0, NOON)
    again = a_key(tokens_per_min=600)
    assert refused(lambda: gate.enter(again, 500, 0.0, NOON)).limit == "tokens"
    entry.leave(0, 0.0)
    assert left(gate.enter(again, 500, 0.0, NOON), "tokens") == 100


def test_a_days_quota_ends_with_the_day() -> None:
    gate, key = Gate(), a_key(tokens_per_day=1000)
    gate.enter(key, 400, 0.0, NOON).leave(999, 0.0)
    # One token is left, so one more request is let in, whatever it takes.
    gate.enter(key, 400, 1.0, NOON).leave(500, 1.0)
    error = refused(lambda: gate.enter(key, 1, 2.0, NOON))
    assert (error.code, error.meaning.number) == (ErrorCode.QUOTA_EXCEEDED, 3036)
    assert (error.retry_after_s, error.headers["x-should-retry"]) == (DAY_S / 2, "false")
    gate.enter(key, 500, 3.0, NOON + DAY_S / 2)


def test_a_request_that_ends_after_midnight_counts_for_the_new_day() -> None:
    gate, key = Gate(), a_key(tokens_per_day=100)
    entry = gate.enter(key, 90, 0.0, NOON)
    tomorrow = NOON + DAY_S
    other = gate.enter(key, 10, 1.0, tomorrow)
    entry.leave(90, 2.0)
    assert refused(lambda: gate.enter(key, 1, 3.0, tomorrow)).limit == "quota"
    other.leave(0, 3.0)
    gate.enter(key, 1, 3.0, tomorrow)


def test_spend_is_counted_by_the_models_price() -> None:
    price = Price(prompt_per_million=2.0, cached_per_million=0.5, output_per_million=10.0)
    assert price.spend(1_000_000, 400_000, 100_000) == pytest.approx(1.2 + 0.2 + 1.0)
    assert Price(prompt_per_million=2.0).spend(1_000_000, 400_000, 7) == pytest.approx(2.0)
    gate, key = Gate(), a_key(spend_per_day=1.0)
    gate.enter(key, 10, 0.0, NOON, 0.2).leave(10, 0.0, 0.9)
    held = gate.enter(key, 10, 0.0, NOON, 0.2)
    assert refused(lambda: gate.enter(key, 10, 0.0, NOON, 0.2)).limit == "quota"
    held.leave(0, 0.0, 0.0)
    gate.enter(key, 10, 0.0, NOON, 0.2)


def test_what_the_ledger_says_is_spent_is_spent_here_too() -> None:
    gate = Gate()
    error = refused(lambda: gate.enter(a_key(spent_until=NOON + 600), 1, 0.0, NOON))
    assert error.limit == "quota"
    gate.enter(a_key(spent_until=NOON + 600), 1, 0.0, NOON + 601)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_together_never_exceed_the_limit(processes: int) -> None:
    key = a_key(requests_per_min=16, tokens_per_min=1600, concurrency=8)
    gates = [Gate(processes) for _ in range(processes)]
    admitted = 0
    for gate in gates:
        for _ in range(20):
            try:
                gate.enter(key, 100, 0.0, NOON).leave(100, 0.0)
            except Limited:
                continue
            admitted += 1
    assert 16 - processes < admitted <= 16
    held = 0
    for gate in [Gate(processes) for _ in range(processes)]:
        for _ in range(9):
            try:
                gate.enter(a_key(concurrency=8), 1, 0.0, NOON)
            except Limited:
                continue
            held += 1
    assert 8 <= held <= 8 + processes - 1


def test_a_share_smaller_than_one_still_lets_one_through() -> None:
    gate, key = Gate(8), a_key(requests_per_min=2)
    gate.enter(key, 1, 0.0, NOON)
    error = refused(lambda: gate.enter(key, 1, 0.0, NOON))
    assert error.retry_after_s == pytest.approx(240.0)
    gate.enter(key, 1, 240.0, NOON)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0171, "18ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_guessed_keys_leave_nothing_behind() -> None:
    gate = Gate()
    known = a_key("known")
    for n in range(2000):
        text = format_key(KeyId(f"{n:012d}"), n.to_bytes(32, "big"))
        with pytest.raises(ApiError):
            authenticate({known.key_id: known}, f"Bearer {text}", 0.0)
    assert len(gate) == 0
    gate.enter(known, 1, 0.0, NOON)
    gate.forget({KeyId("other")})
    assert len(gate) == 0


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 400), st.integers(0, 400)), max_size=60),
)
def test_limits_hold_over_any_minute(per_min: int, asks: list[tuple[float, int, int]]) -> None:
    gate = Gate()
    key = a_key(requests_per_min=per_min, tokens_per_min=1000, concurrency=1)
    now_s, admitted, waits_s = 0.0, [], []
    for wait_s, estimate, used in asks:
        now_s += wait_s
        try:
            gate.enter(key, estimate, now_s, NOON).leave(used, now_s)
        except Limited as error:
            waits_s.append(error.retry_after_s or 0)
            continue
        admitted.append(now_s)
    assert all(1 <= wait_s <= 600 for wait_s in waits_s)
    # A meter of a minute's worth admits at most that much and what a minute refills.
    for start_s in admitted:
        within = [at_s for at_s in admitted if start_s <= at_s <= start_s + 60]
        assert len(within) <= 2 * per_min + 1


class GateAgainstLedger(RuleBasedStateMachine):
    """The gate beside a plain token bucket per limit that remembers everything."""

    REQUESTS, TOKENS, AT_ONCE = 5, 300, 3

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.key = a_key(
            requests_per_min=self.REQUESTS, tokens_per_min=self.TOKENS, concurrency=self.AT_ONCE
        )
        self.now_s = 0.0
        self.requests_level = float(self.REQUESTS)
        self.tokens_level = float(self.TOKENS)
        self.held: list[tuple[Entry, int]] = []

    @rule(seconds=st.floats(0, 90))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        refill = seconds / 60
        self.requests_level = min(self.REQUESTS, self.requests_level + refill * self.REQUESTS)
        self.tokens_level = min(self.TOKENS, self.tokens_level + refill * self.TOKENS)

    @rule(estimate=st.integers(0, 500))
    def ask(self, estimate: int) -> None:
        wanted = min(estimate, self.TOKENS)
        margins = (self.requests_level - 1, self.tokens_level - wanted)
        try:
            entry = self.gate.enter(self.key, estimate, self.now_s, NOON)
        except Limited as error:
            assert min(margins) < 1e-4 or len(self.held) >= self.AT_ONCE
            self._is_honest(error, estimate)
            return
        assert min(margins) > -1e-4
        assert len(self.held) < self.AT_ONCE
        self.requests_level -= 1
        self.tokens_level -= estimate
        self.held.append((entry, estimate))

    @precondition(lambda self: self.held)
    @rule(used=st.integers(0, 500), which=st.integers(0, 10))
    def end(self, used: int, which: int) -> None:
        entry, estimate = self.held.pop(which % len(self.held))
        entry.leave(used, self.now_s)
        entry.leave(used, self.now_s)
        self.tokens_level = min(self.TOKENS, self.tokens_level + estimate - used)

    @invariant()
    def what_is_told_is_what_is_left(self) -> None:
        if self.held:
            level = left(self.held[-1][0], "tokens", self.now_s)
            assert abs(level - max(0, self.tokens_level)) <= 1.01

    def _is_honest(self, error: Limited, estimate: int) -> None:
        """Who comes back when told to is let in, if nobody else asks meanwhile."""
        assert error.retry_after_s is not None
        if error.limit == "concurrency":
            return
        wait_s = error.retry_after_s
        refill = wait_s / 60
        assert self.requests_level + refill * self.REQUESTS >= 1 - 1e-4
        assert min(self.TOKENS, self.tokens_level + refill * self.TOKENS) >= (
            min(estimate, self.TOKENS) - 1e-3
        )


GateAgainstLedger.TestCase.settings = settings(deadline=None, max_examples=40)
TestGateAgainstLedger = GateAgainstLedger.TestCase
