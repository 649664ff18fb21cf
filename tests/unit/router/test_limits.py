"""A key's limits, by examples and against a model with a token bucket per limit."""

import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.client_keys.key_use import KeyUse
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import ClusterId, Epoch, Generation, KeyId, TenantId
from isochrone.wire.models.model import Price
from isochrone.wire.peers.routes import KeyEntry, KeyLimits, KeyTable, RouteTable
from router.decide.admission.authentication import authenticate
from router.decide.admission.limits import (
    DAY_S,
    AdmittedRequest,
    KeyLimiter,
    LimitExceeded,
    format_duration,
)
from router.decide.routes.route_directory import RouteDirectory

NOON = 10 * DAY_S + DAY_S / 2


def a_key(name: str = "k", spent_until: float = 0.0, **limits: float) -> KeyEntry:
    return KeyEntry(
        key_id=KeyId(name),
        secret_sha256="",
        tenant_id=TenantId("t"),
        limits=KeyLimits(**limits),  # type: ignore[arg-type]
        spent_until=spent_until,
    )


def refused(admit: Callable[[], AdmittedRequest]) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        admit()
    return caught.value


def remaining(entry: AdmittedRequest, name: str, now_s: float = 0.0) -> int:
    lines = dict(line.split(": ") for line in entry.header_lines(now_s).splitlines())
    return int(lines[f"x-ratelimit-remaining-{name}"])


def test_a_limited_key_is_admitted_after_the_time_it_was_told() -> None:
    limiter, key = KeyLimiter(), a_key(requests_per_min=6, tokens_per_min=600)
    for _ in range(6):
        limiter.admit(key, 10, 0.0, NOON).settle(10, 0.0)
    error = refused(lambda: limiter.admit(key, 10, 0.0, NOON))
    assert (error.limit, error.code, error.meaning.number) == (
        "requests",
        ErrorCode.RATE_LIMITED,
        10429,
    )
    assert error.retry_after_s == pytest.approx(10.0)
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert error.message.endswith("6 requests a minute, the key's limit; try again in 10 s")
    assert remaining(limiter.admit(key, 10, 10.0, NOON), "requests", 10.0) == 0


def test_the_error_names_the_limit_with_the_longest_wait() -> None:
    limiter, key = KeyLimiter(), a_key(requests_per_min=60, tokens_per_min=600, concurrency=1)
    held = limiter.admit(key, 600, 0.0, NOON)
    error = refused(lambda: limiter.admit(key, 300, 0.0, NOON))
    assert (error.limit, error.retry_after_s) == ("tokens", pytest.approx(30.0))
    error = refused(lambda: limiter.admit(key, 1, 60.0, NOON))
    assert (error.limit, error.retry_after_s) == ("concurrency", 1.0)
    held.settle(600, 60.0)
    limiter.admit(key, 1, 60.0, NOON)


def test_real_use_replaces_the_estimate_once() -> None:
    limiter, key = KeyLimiter(), a_key(tokens_per_min=600)
    entry = limiter.admit(key, 500, 0.0, NOON)
    assert refused(lambda: limiter.admit(key, 200, 0.0, NOON)).limit == "tokens"
    entry.settle(100, 0.0)
    entry.settle(0, 0.0)
    assert remaining(limiter.admit(key, 200, 0.0, NOON), "tokens") == 300
    # A request larger than the limit is admitted by a full meter, and owed afterwards.
    limiter.admit(key, 6000, 100.0, NOON)
    again_s = refused(lambda: limiter.admit(key, 1, 100.0, NOON)).retry_after_s
    assert again_s is not None and again_s > 500


def test_a_failed_request_gives_its_tokens_back_but_still_counts() -> None:
    limiter, key = KeyLimiter(), a_key(requests_per_min=10, tokens_per_min=1000)
    limiter.admit(key, 900, 0.0, NOON).settle(0, 0.0)
    entry = limiter.admit(key, 0, 0.0, NOON)
    assert (remaining(entry, "requests"), remaining(entry, "tokens")) == (8, 1000)


def test_new_limits_start_with_full_meters() -> None:
    limiter = KeyLimiter()
    held = limiter.admit(a_key(), 10**6, 0.0, NOON)
    limited = a_key(requests_per_min=2, tokens_per_min=100, concurrency=2)
    entry = limiter.admit(limited, 60, 0.0, NOON)
    assert (remaining(entry, "requests"), remaining(entry, "tokens")) == (1, 40)
    assert refused(lambda: limiter.admit(limited, 1, 0.0, NOON)).limit == "concurrency"
    held.settle(5, 0.0)
    assert remaining(limiter.admit(limited, 1, 0.0, NOON), "tokens") == 39


def test_equal_limits_in_a_new_table_keep_their_meters() -> None:
    limiter = KeyLimiter()
    entry = limiter.admit(a_key(tokens_per_min=600), 500, 0.0, NOON)
    again = a_key(tokens_per_min=600)
    assert refused(lambda: limiter.admit(again, 500, 0.0, NOON)).limit == "tokens"
    entry.settle(0, 0.0)
    assert remaining(limiter.admit(again, 500, 0.0, NOON), "tokens") == 100


def test_a_daily_quota_ends_with_the_day() -> None:
    limiter, key = KeyLimiter(), a_key(tokens_per_day=1000)
    limiter.admit(key, 400, 0.0, NOON).settle(999, 0.0)
    # One token is left, so one more request is admitted, whatever it uses.
    limiter.admit(key, 400, 1.0, NOON).settle(500, 1.0)
    error = refused(lambda: limiter.admit(key, 1, 2.0, NOON))
    assert (error.code, error.meaning.number) == (ErrorCode.QUOTA_EXCEEDED, 3036)
    assert (error.retry_after_s, error.headers["x-should-retry"]) == (DAY_S / 2, "false")
    limiter.admit(key, 500, 3.0, NOON + DAY_S / 2)


def test_a_request_that_ends_after_midnight_counts_for_the_new_day() -> None:
    limiter, key = KeyLimiter(), a_key(tokens_per_day=100)
    entry = limiter.admit(key, 90, 0.0, NOON)
    tomorrow = NOON + DAY_S
    other = limiter.admit(key, 10, 1.0, tomorrow)
    entry.settle(90, 2.0)
    assert refused(lambda: limiter.admit(key, 1, 3.0, tomorrow)).limit == "quota"
    other.settle(0, 3.0)
    limiter.admit(key, 1, 3.0, tomorrow)


def test_spend_is_counted_by_the_price_of_the_model() -> None:
    price = Price(prompt_per_million=2.0, cached_per_million=0.5, output_per_million=10.0)
    assert price.spend(1_000_000, 400_000, 100_000) == pytest.approx(1.2 + 0.2 + 1.0)
    assert Price(prompt_per_million=2.0).spend(1_000_000, 400_000, 7) == pytest.approx(2.0)
    limiter, key = KeyLimiter(), a_key(spend_per_day=1.0)
    limiter.admit(key, 10, 0.0, NOON, 0.2).settle(10, 0.0, 0.9)
    held = limiter.admit(key, 10, 0.0, NOON, 0.2)
    assert refused(lambda: limiter.admit(key, 10, 0.0, NOON, 0.2)).limit == "quota"
    held.settle(0, 0.0, 0.0)
    limiter.admit(key, 10, 0.0, NOON, 0.2)


def test_a_quota_spent_fleet_wide_is_refused_here_too() -> None:
    limiter = KeyLimiter()
    error = refused(lambda: limiter.admit(a_key(spent_until=NOON + 600), 1, 0.0, NOON))
    assert error.limit == "quota"
    limiter.admit(a_key(spent_until=NOON + 600), 1, 0.0, NOON + 601)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_together_never_exceed_the_limit(processes: int) -> None:
    key = a_key(requests_per_min=16, tokens_per_min=1600, concurrency=8)
    limiters = [KeyLimiter(processes) for _ in range(processes)]
    admitted = 0
    for limiter in limiters:
        for _ in range(20):
            try:
                limiter.admit(key, 100, 0.0, NOON).settle(100, 0.0)
            except LimitExceeded:
                continue
            admitted += 1
    assert 16 - processes < admitted <= 16
    held = 0
    for limiter in [KeyLimiter(processes) for _ in range(processes)]:
        for _ in range(9):
            try:
                limiter.admit(a_key(concurrency=8), 1, 0.0, NOON)
            except LimitExceeded:
                continue
            held += 1
    assert 8 <= held <= 8 + processes - 1


def test_a_share_below_one_request_still_admits_one() -> None:
    limiter, key = KeyLimiter(8), a_key(requests_per_min=2)
    limiter.admit(key, 1, 0.0, NOON)
    error = refused(lambda: limiter.admit(key, 1, 0.0, NOON))
    assert error.retry_after_s == pytest.approx(240.0)
    limiter.admit(key, 1, 240.0, NOON)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0171, "18ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_guessed_keys_leave_no_state() -> None:
    limiter = KeyLimiter()
    known = a_key("known")
    for n in range(2000):
        text = format_key(KeyId(f"{n:012d}"), n.to_bytes(32, "big"))
        with pytest.raises(ApiError):
            authenticate(KeyTable.of([known]), f"Bearer {text}", 0.0)
    assert len(limiter) == 0
    limiter.admit(known, 1, 0.0, NOON)
    limiter.forget([KeyId("other")])
    assert limiter.key_ids() == [known.key_id]
    limiter.forget([known.key_id])
    assert len(limiter) == 0


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 400), st.integers(0, 400)), max_size=60),
)
def test_limits_hold_over_any_minute(per_min: int, requests: list[tuple[float, int, int]]) -> None:
    limiter = KeyLimiter()
    key = a_key(requests_per_min=per_min, tokens_per_min=1000, concurrency=1)
    now_s, admitted, waits_s = 0.0, [], []
    for wait_s, estimate, used in requests:
        now_s += wait_s
        try:
            limiter.admit(key, estimate, now_s, NOON).settle(used, now_s)
        except LimitExceeded as error:
            waits_s.append(error.retry_after_s or 0)
            continue
        admitted.append(now_s)
    assert all(1 <= wait_s <= 600 for wait_s in waits_s)
    # A meter admits at most one minute's worth and what another minute refills.
    for start_s in admitted:
        within = [at_s for at_s in admitted if start_s <= at_s <= start_s + 60]
        assert len(within) <= 2 * per_min + 1


class LimiterAgainstModel(RuleBasedStateMachine):
    """The limiter beside a plain token bucket for each limit."""

    REQUESTS, TOKENS, CONCURRENT = 5, 300, 3

    def __init__(self) -> None:
        super().__init__()
        self.limiter = KeyLimiter()
        self.key = a_key(
            requests_per_min=self.REQUESTS, tokens_per_min=self.TOKENS, concurrency=self.CONCURRENT
        )
        self.now_s = 0.0
        self.requests_level = float(self.REQUESTS)
        self.tokens_level = float(self.TOKENS)
        self.held: list[tuple[AdmittedRequest, int]] = []

    @rule(seconds=st.floats(0, 90))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        refill = seconds / 60
        self.requests_level = min(self.REQUESTS, self.requests_level + refill * self.REQUESTS)
        self.tokens_level = min(self.TOKENS, self.tokens_level + refill * self.TOKENS)

    @rule(estimate=st.integers(0, 500))
    def admit(self, estimate: int) -> None:
        wanted = min(estimate, self.TOKENS)
        margins = (self.requests_level - 1, self.tokens_level - wanted)
        try:
            entry = self.limiter.admit(self.key, estimate, self.now_s, NOON)
        except LimitExceeded as error:
            assert min(margins) < 1e-4 or len(self.held) >= self.CONCURRENT
            self._check_wait(error, estimate)
            return
        assert min(margins) > -1e-4
        assert len(self.held) < self.CONCURRENT
        self.requests_level -= 1
        self.tokens_level -= estimate
        self.held.append((entry, estimate))

    @precondition(lambda self: self.held)
    @rule(used=st.integers(0, 500), which=st.integers(0, 10))
    def end(self, used: int, which: int) -> None:
        entry, estimate = self.held.pop(which % len(self.held))
        entry.settle(used, self.now_s)
        entry.settle(used, self.now_s)
        self.tokens_level = min(self.TOKENS, self.tokens_level + estimate - used)

    @invariant()
    def the_header_is_what_remains(self) -> None:
        if self.held:
            level = remaining(self.held[-1][0], "tokens", self.now_s)
            assert abs(level - max(0, self.tokens_level)) <= 1.01

    def _check_wait(self, error: LimitExceeded, estimate: int) -> None:
        """Who comes back when told to is let in, if nobody else requests meanwhile."""
        assert error.retry_after_s is not None
        if error.limit == "concurrency":
            return
        wait_s = error.retry_after_s
        refill = wait_s / 60
        assert self.requests_level + refill * self.REQUESTS >= 1 - 1e-4
        assert min(self.TOKENS, self.tokens_level + refill * self.TOKENS) >= (
            min(estimate, self.TOKENS) - 1e-3
        )


LimiterAgainstModel.TestCase.settings = settings(deadline=None, max_examples=40)
TestLimiterAgainstModel = LimiterAgainstModel.TestCase


def a_budget(spent_until: float = 0.0, **limits: float) -> KeyEntry:
    return msgspec.structs.replace(a_key("k", spent_until, **limits), key_id=budget_id("t"))


def test_a_tenants_budget_holds_for_all_of_its_keys_together() -> None:
    limiter, budget = KeyLimiter(), a_budget(requests_per_min=3, tokens_per_min=1000)
    one, two = a_key("one", requests_per_min=2), a_key("two")
    for key in (one, two, one):
        limiter.admit(key, 100, 0.0, NOON, budget=budget).settle(300, 0.0)
    refusal = refused(lambda: limiter.admit(two, 0, 0.0, NOON, budget=budget))
    assert refusal.message.endswith("3 requests a minute, the tenant's limit; try again in 20 s")
    with pytest.raises(LimitExceeded, match="the key's limit"):
        limiter.check(one, 0.0, NOON, budget)
    # The use of both keys is told to the other routers, and that of the tenant.
    told = {use.key_id: (use.requests, use.tokens) for use in limiter.take_unshared()}
    assert told == {"one": (2, 0), "tenant:t": (3, 900)}


def test_a_request_that_the_tenant_may_not_send_draws_nothing_from_its_key() -> None:
    limiter, key = KeyLimiter(), a_key(requests_per_min=1, concurrency=1)
    for _ in range(3):
        refused(lambda: limiter.admit(key, 0, 0.0, NOON, budget=a_budget(spent_until=NOON + 1)))
    limiter.admit(key, 0, 0.0, NOON)


@pytest.mark.parametrize(
    ("until", "limits", "period"),
    [
        (NOON + DAY_S / 2, KeyLimits(tokens_per_day=10), "day"),
        (NOON + 20 * DAY_S, KeyLimits(tokens_per_day=10), "month"),
        # The last day of a month.
        (NOON + DAY_S / 2, KeyLimits(tokens_per_month=10), "month"),
    ],
    ids=["day", "month", "last day"],
)
def test_a_spent_budget_names_its_period(until: float, limits: KeyLimits, period: str) -> None:
    budget = msgspec.structs.replace(a_budget(spent_until=until), limits=limits)
    refusal = refused(lambda: KeyLimiter().admit(a_key(), 0, 0.0, NOON, budget=budget))
    assert f"the tenant's quota of this {period} (UTC) is used up" in refusal.message
    assert (refusal.code, refusal.retry_after_s) == (ErrorCode.QUOTA_EXCEEDED, until - NOON)
    key = msgspec.structs.replace(a_key(spent_until=until), limits=limits)
    refusal = refused(lambda: KeyLimiter().admit(key, 0, 0.0, NOON))
    assert f"the key's quota of this {period} (UTC) is used up" in refusal.message


def test_use_at_other_routers_is_drawn_from_the_budget() -> None:
    limiter, budget = KeyLimiter(), a_budget(requests_per_min=2)
    limiter.draw_elsewhere(budget, KeyUse(budget.key_id, 2, 0), 0.0, NOON)
    refused(lambda: limiter.admit(a_key(), 0, 0.0, NOON, budget=budget))


def test_no_key_of_a_client_is_a_budget() -> None:
    entry = msgspec.structs.replace(a_budget(), key_id=budget_id("abcde"), secret_sha256="")
    text = format_key(KeyId("tenant:abcde"), b"\0" * 32)
    with pytest.raises(ApiError) as caught:
        authenticate(KeyTable.of([entry]), f"Bearer {text}", NOON)
    assert caught.value.code is ErrorCode.INVALID_KEY


def test_the_directory_finds_the_budget_of_a_tenant() -> None:
    entries = [a_budget(), a_key("tenanta"), a_key("zz"), a_key("a")]
    table = RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        keys=KeyTable.of(entries),
    )
    directory = RouteDirectory()
    assert directory.budget_of(entries[1]) is None
    directory.adopt(table)
    assert directory.budget_of(entries[1]) == entries[0]
    stranger = msgspec.structs.replace(entries[1], tenant_id=TenantId("other"))
    assert directory.budget_of(stranger) is None
    directory.adopt_keys(msgspec.structs.replace(table, keys=KeyTable.of(entries[1:])))
    assert directory.budget_of(entries[1]) is None


def test_a_changed_key_costs_the_same_beside_many_budgets() -> None:
    budgets = [
        msgspec.structs.replace(a_budget(), key_id=budget_id(f"t{n}"), tenant_id=TenantId(f"t{n}"))
        for n in range(5_000)
    ]
    table = RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        keys=KeyTable.of([*budgets, a_key("k")]),
    )
    changed = msgspec.structs.replace(table, keys=table.keys.replaced([a_key("k", NOON)], ()))
    directory = RouteDirectory()
    directory.adopt(table)
    tracemalloc.start()
    try:
        directory.adopt_keys(changed)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4096, "nothing is made of all budgets"
    key = msgspec.structs.replace(a_key("k"), tenant_id=TenantId("t4999"))
    assert directory.budget_of(key) is budgets[-1]
