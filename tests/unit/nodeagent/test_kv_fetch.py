"""Fetch or compute a prefix: decided from measured rates, within the link's budget."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from math import inf
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent.decide.requests.kv_fetch import (
    AGING_S,
    BACKOFF_MAX_S,
    BACKOFF_S,
    COST_SHARE_MAX,
    FETCHES_MAX,
    LATENCY_UNKNOWN_S,
    STORE_S_MAX,
    TIMEOUT_MIN_S,
    FetchChoice,
    FetchLimits,
    FetchPlan,
    FetchRate,
    LinkBudget,
    MissingPrefix,
    PrefixHolder,
    plan_fetch,
)
from nodeagent.decide.requests.kv_quota import NO_KV_LIMITS, KvQuota, KvUser
from nodeagent.disaggregation.kv_fetch import (
    FetchedPrefix,
    FetchRates,
    KvHolders,
    PrefixFetcher,
    _ArrivingBlocks,
)
from nodeagent.disaggregation.kv_windows import WindowLease

MEBIBYTE = 1024 * 1024
ENGINE_LOST, SENDER_LOST = 1, 2
"""In place of an engine's status."""


def rate_of(bytes_per_s: float) -> FetchRate:
    """Return what a fetch of a second has taught; its first bytes came at once."""
    rate = FetchRate()
    rate.record(int(bytes_per_s), 1.0, 0.0, 0.0)
    return rate


def limits(
    budget_bytes: float = inf,
    running: int = 0,
    deadline_s: float = inf,
    now_s: float = 0.0,
    quota_bytes: float = inf,
) -> FetchLimits:
    return FetchLimits(budget_bytes, quota_bytes, running, deadline_s, now_s)


def a_holder(name: str, blocks: int, bytes_per_s: float = 1e9) -> PrefixHolder:
    peer = PeerReplica(ReplicaId(name), NodeId(name), f"{name}:1", 0, 0, 1)
    return PrefixHolder(peer, blocks, rate_of(bytes_per_s))


def a_keeper(name: str, blocks: int, bytes_per_s: float = 1e9) -> PrefixHolder:
    """Return the replica that would keep a copy."""
    return a_holder(name, blocks, bytes_per_s)._replace(keeps_copy=True)


def a_prompt(**fields: int) -> MissingPrefix:
    values = {
        "held_blocks": 10,
        "blocks": 100,
        "block_tokens": 16,
        "block_bytes": MEBIBYTE,
        "token_us": 1000,
        **fields,
    }
    return MissingPrefix(**values)


def test_the_holder_of_most_blocks_is_asked_for_what_is_missing() -> None:
    holders = [a_holder("a", 40), a_holder("b", 90), a_holder("c", 90)]
    plan = plan_fetch(a_prompt(), holders, limits())
    assert plan.peer is not None
    assert (plan.choice, plan.peer.replica_id, plan.blocks) == (FetchChoice.FETCH, "b", 80)
    # Not longer than computing would take: 80 blocks of 16 tokens, 1 ms each.
    assert plan.timeout_s == pytest.approx(1.28)


def test_a_nearer_holder_of_less_may_save_more() -> None:
    holders = [a_holder("slow", 90, 60e6), a_holder("fast", 80), a_holder("dead", 99, 1)]
    plan = plan_fetch(a_prompt(), holders, limits())
    assert plan.peer is not None
    assert (plan.peer.replica_id, plan.blocks) == ("fast", 70)


@pytest.mark.parametrize(
    ("prompt", "holders", "allowed", "choice"),
    [
        (a_prompt(), [a_keeper("a", 10)], limits(), FetchChoice.NO_COPY),
        (a_prompt(), [a_holder("a", 10), a_keeper("b", 0)], limits(), FetchChoice.NOT_HELD),
        (a_prompt(), [a_keeper("a", 90, 125_000)], limits(), FetchChoice.SLOW),
        (a_prompt(), [a_holder("a", 10)], limits(), FetchChoice.NOT_HELD),
        (a_prompt(held_blocks=100), [a_holder("a", 900)], limits(), FetchChoice.NOT_HELD),
        # 1 Mbit/s.
        (a_prompt(), [a_holder("a", 90, 125_000)], limits(), FetchChoice.SLOW),
        (a_prompt(token_us=10), [a_holder("a", 90, 1e8)], limits(), FetchChoice.SLOW),
        (a_prompt(), [a_holder("a", 90)], limits(budget_bytes=MEBIBYTE - 1), FetchChoice.BUDGET),
        (a_prompt(), [a_holder("a", 90)], limits(quota_bytes=MEBIBYTE - 1), FetchChoice.QUOTA),
        (a_prompt(), [a_holder("a", 90)], limits(running=FETCHES_MAX), FetchChoice.BUSY),
        # Computing all that is missing takes 1.44 s.
        (a_prompt(), [a_holder("a", 90)], limits(deadline_s=1.45), FetchChoice.DEADLINE),
    ],
)
def test_a_fetch_is_refused_with_a_reason(
    prompt: MissingPrefix,
    holders: list[PrefixHolder],
    allowed: FetchLimits,
    choice: FetchChoice,
) -> None:
    plan = plan_fetch(prompt, holders, allowed)
    assert (plan.choice, plan.peer, plan.blocks) == (choice, None, 0)


@given(
    blocks=st.integers(0, 300),
    counts=st.lists(st.integers(0, 400), max_size=4),
    held=st.integers(0, 300),
    block_bytes=st.integers(1, 10**7),
    token_us=st.integers(1, 10**5),
    bytes_per_s=st.integers(1, 10**10),
    budget=st.floats(0, 1e9),
    deadline_s=st.floats(-1, 1e6),
)
def test_a_fetch_is_predicted_to_pay_and_keeps_to_the_budget(
    blocks: int,
    counts: list[int],
    held: int,
    block_bytes: int,
    token_us: int,
    bytes_per_s: int,
    budget: float,
    deadline_s: float,
) -> None:
    held = min(held, blocks)
    prompt = MissingPrefix(held, blocks, 16, block_bytes, token_us)
    holders = [a_holder(str(number), count, bytes_per_s) for number, count in enumerate(counts)]
    allowed = limits(budget_bytes=budget, deadline_s=deadline_s)
    plan = plan_fetch(prompt, holders, allowed)
    assert (plan.peer is None) == (plan.choice is not FetchChoice.FETCH)
    if plan.peer is None:
        return
    assert 0 < plan.blocks <= blocks - held
    assert plan.blocks * block_bytes <= budget
    assert held + plan.blocks <= max(counts)
    compute_s = plan.blocks * 16 * token_us / 1e6
    predicted_s = plan.blocks * block_bytes / bytes_per_s
    assert predicted_s < COST_SHARE_MAX * compute_s * (1 + 1e-9)
    assert plan.timeout_s >= predicted_s
    # Whatever becomes of it, the prompt can be computed before the deadline.
    missing_s = (blocks - held) * 16 * token_us / 1e6
    assert plan.timeout_s + missing_s <= deadline_s * (1 + 1e-9)


def test_a_link_that_got_slow_is_believed_soon_and_tried_again_in_time() -> None:
    rate = rate_of(1e9)
    prompt, holders = a_prompt(), [a_holder("a", 90)._replace(rate=rate)]
    for _ in range(2):
        rate.record(125_000, 1.0, 0.0, now_s=100.0)
    refused = plan_fetch(prompt, holders, limits(now_s=100.0 + AGING_S / 2))
    assert refused.choice is FetchChoice.SLOW
    tried = plan_fetch(prompt, holders, limits(now_s=100.0 + AGING_S))
    assert tried.choice is FetchChoice.FETCH
    # Another one that is known to be fast is preferred to it.
    holders.append(a_holder("fast", 90))
    better = plan_fetch(prompt, holders, limits(now_s=100.0 + AGING_S))
    assert better.peer is not None
    assert better.peer.replica_id == "fast"


def test_the_part_of_a_late_fetch_counts_with_its_time_and_its_node_is_left_alone() -> None:
    rate, now_s = rate_of(1e9), 0.0
    assert rate.may_ask(now_s)
    rate.record_late(1000, 5.0, 4.0, now_s)
    assert 1.0 < rate.predict_s(0) <= 4.0
    assert rate.bytes_per_s < 2000
    pauses = []
    for _ in range(12):
        began_s = now_s
        while not rate.may_ask(now_s):
            now_s += BACKOFF_S / 4
        pauses.append(now_s - began_s)
        rate.record_failure(1.0, now_s)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (BACKOFF_S, BACKOFF_MAX_S)
    rate.record(1000, 0.1, 0.01, now_s)
    assert rate.may_ask(now_s + BACKOFF_MAX_S)
    rate.record_failure(1.0, now_s)
    assert rate.may_ask(now_s + BACKOFF_S)


def test_a_node_that_is_back_is_trusted_as_before_it_was_lost() -> None:
    """A dead engine of the store made every fetch time out for 5 s. Its blocks were computed for
    minutes then: one fetch in 30 s showed that the store is fast, and counted for a third.
    """
    rate, now_s = rate_of(1e9), 0.0
    holders = [a_holder("a", 90)._replace(rate=rate)]
    for _ in range(3):
        while not rate.may_ask(now_s):
            now_s += BACKOFF_S
        plan = plan_fetch(a_prompt(), holders, limits(now_s=now_s))
        assert plan.choice is FetchChoice.FETCH
        now_s += plan.timeout_s
        rate.record_late(0, plan.timeout_s, inf, now_s)
    now_s += 4 * BACKOFF_S
    assert rate.may_ask(now_s)
    assert plan_fetch(a_prompt(), holders, limits(now_s=now_s)).choice is FetchChoice.FETCH


def test_a_fast_fetch_after_a_long_refusal_counts_alone() -> None:
    """What was measured 30 s ago refused every fetch that could have corrected it."""
    rate, now_s = rate_of(1e9), 100.0
    for _ in range(3):
        rate.record_late(1000, 5.0, 4.0, now_s)
    now_s += AGING_S
    rate.record(80 * MEBIBYTE, 0.1, 0.01, now_s)
    holders = [a_holder("a", 90)._replace(rate=rate)]
    assert plan_fetch(a_prompt(), holders, limits(now_s=now_s)).choice is FetchChoice.FETCH
    # A slow one is still believed only in part.
    rate.record(80 * MEBIBYTE, 5.0, 4.0, now_s + AGING_S)
    assert rate.latency_s < 4.0


def test_fetches_that_fail_together_are_one_failure() -> None:
    """The death of a holder in four fetches stopped those from its node for 8 s instead of 1 s."""
    rate = rate_of(1e9)
    for ended_s in (10.0, 10.1, 10.2, 10.4):
        rate.record_failure(0.5, ended_s)
    assert rate.may_ask(10.4 + BACKOFF_S)
    # One that began after them is another.
    rate.record_failure(0.5, 12.0)
    assert not rate.may_ask(12.0 + BACKOFF_S)
    assert rate.may_ask(12.0 + 2 * BACKOFF_S)


@given(
    fetches=st.lists(
        st.tuples(st.booleans(), st.integers(0, 10**9), st.floats(0, 100), st.floats(0, 1)),
        max_size=30,
    )
)
def test_predictions_stay_within_what_was_measured(
    fetches: list[tuple[bool, int, float, float]],
) -> None:
    rate, seen_s = FetchRate(), [LATENCY_UNKNOWN_S]
    for is_whole, transfer_bytes, seconds, first_share in fetches:
        learn = rate.record if is_whole else rate.record_late
        learn(transfer_bytes, seconds, first_share * seconds, 0.0)
        seen_s.append(seconds)
        assert rate.bytes_per_s > 0
        assert 0 <= rate.latency_s <= max(seen_s) * (1 + 1e-9)
        assert rate.predict_s(10**6) >= rate.predict_s(0)


@given(steps=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000)), max_size=40))
def test_what_is_moved_stays_within_the_budget(steps: list[tuple[float, int]]) -> None:
    budget, now_s, moved = LinkBudget(1000.0), 0.0, 0
    for pause_s, wanted in steps:
        now_s += pause_s
        taken = min(wanted, int(budget.available(now_s)))
        budget.take(taken, now_s)
        moved += taken
    assert moved <= 1000.0 * (now_s + 1) + 1e-6
    assert LinkBudget(0).available(now_s) == inf


def test_what_was_taken_too_much_is_missing_later() -> None:
    budget = LinkBudget(1000.0)
    budget.take(3000, 0.0)
    assert budget.available(1.0) == 0
    assert budget.available(2.5) == pytest.approx(500)


BLOCK_S = 0.016
"""The time to compute a block of `a_prompt`."""


def fetched(plan: FetchPlan, arrivals_s: Sequence[float]) -> tuple[int, float]:
    """Return how many blocks a fetch gets whose blocks come at these times, and when it ends."""
    for arrived, at_s in enumerate(arrivals_s):
        before_s = arrivals_s[arrived - 1] if arrived else 0.0
        until_s = plan.give_up_at_s(arrived, arrivals_s[0], before_s)
        if at_s > until_s:
            return arrived, until_s
    return len(arrivals_s), arrivals_s[-1]


def a_plan(blocks: int, limit_s: float = inf) -> FetchPlan:
    peer = a_holder("a", blocks).peer
    compute_s = blocks * BLOCK_S
    timeout_s = min(max(TIMEOUT_MIN_S, compute_s), limit_s)
    return FetchPlan(FetchChoice.FETCH, peer, blocks, timeout_s, BLOCK_S, limit_s)


@given(
    blocks=st.integers(1, 300),
    first_share=st.floats(0, 1),
    pace=st.floats(0, 0.99),
)
def test_a_fetch_that_is_faster_than_computing_is_not_given_up(
    blocks: int, first_share: float, pace: float
) -> None:
    plan = a_plan(blocks)
    first_s = first_share * plan.timeout_s
    arrivals_s = [first_s + number * pace * BLOCK_S for number in range(blocks)]
    assert fetched(plan, arrivals_s)[0] == blocks


@given(
    gaps_s=st.lists(st.floats(0, 2), min_size=1, max_size=100),
    limit_s=st.floats(0.01, 5),
)
def test_whatever_comes_a_fetch_ends_in_time(gaps_s: list[float], limit_s: float) -> None:
    plan, arrivals_s = a_plan(len(gaps_s), limit_s), list(accumulate(gaps_s))
    _, ended_s = fetched(plan, arrivals_s)
    # As long as computing until the first block, and as long again. The request's deadline holds.
    assert ended_s <= min(limit_s, 2 * plan.timeout_s) * (1 + 1e-9)
    stored_by_s = plan.give_up_at_s(plan.blocks, arrivals_s[0], ended_s)
    assert stored_by_s <= min(limit_s, ended_s + STORE_S_MAX)


def test_a_fetch_is_given_up_once_its_rest_would_be_computed_sooner() -> None:
    plan = a_plan(100)
    assert plan.timeout_s == pytest.approx(1.6)
    # Late by a step at the source, then fast.
    late_s = [1.5 + 0.002 * number for number in range(100)]
    assert fetched(plan, late_s) == (100, late_s[-1])
    # The rest takes 0.16 s to compute: it is not waited for until the end of the time allowed.
    stalled_s = [0.001 * number for number in range(90)] + [60.0] * 10
    arrived, ended_s = fetched(plan, stalled_s)
    assert (arrived, ended_s) == (90, pytest.approx(0.089 + 0.16))


class Limit:
    """A timeout that notes when it is moved."""

    def __init__(self) -> None:
        self.moved_to_s: list[float] = []

    def reschedule(self, when_s: float) -> None:
        self.moved_to_s.append(when_s)


async def test_a_head_says_nothing_of_when_blocks_come() -> None:
    """It taught latencies of 1 ms and rates of a thousandth, after waits for the sender's step."""
    now_s, limit = [10.0], Limit()
    plan = a_plan(4)
    received = _ArrivingBlocks(plan, WindowLease(), 1000, lambda: now_s[0])

    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for at_s, count in ((10.001, 80), (10.04, 500), (10.05, 600), (10.06, 3500)):
                now_s[0] = at_s
                yield bytes(count)

    sizes, moved = [], []
    any_limit: Any = limit
    any_content: Any = Content()
    async for piece in received.count(any_content, any_limit):
        sizes.append((len(piece), received.moved_bytes(0), received.blocks))
        moved.append(len(limit.moved_to_s))
    assert sizes == [(80, 0, 0), (500, 580, 0), (600, 1180, 1), (3500, 4680, 4)]
    # With each whole block, and not with each piece.
    assert moved == [0, 0, 1, 2]
    assert received.first_at_s == 10.04


class FakeKvAnswer:
    """An answer of an engine or a node."""

    content_type = kv_transfer.CONTENT_TYPE
    content_length = None
    headers: Mapping[str, str] = {}

    def __init__(self, status: int, body: bytes = b"") -> None:
        self.status = status
        self._body = body

    @property
    def content(self) -> "FakeKvAnswer":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        if self._body:
            yield self._body
            return
        yield b"head"
        raise aiohttp.ClientPayloadError("the sender is lost")


class FullHolder:
    """A node whose replica has every block, and is lost while it sends them."""

    @asynccontextmanager
    async def relay(
        self, peer: PeerReplica, path: str, body: bytes, sent: Mapping[str, str]
    ) -> AsyncIterator[Any]:
        located = kv_sharing.LocatedBlocks(blocks=12, block_bytes=1000)
        is_locate = path == kv_sharing.LOCATE_PATH
        yield FakeKvAnswer(200, msgspec.json.encode(located) if is_locate else b"")


class RefusingEngine:
    """An engine that takes no blocks: it answers with a status, or is lost."""

    closed = False

    def __init__(self, status: int) -> None:
        self._status = status

    @asynccontextmanager
    async def post(
        self, path: str, data: AsyncIterator[bytes], **sent: object
    ) -> AsyncIterator[FakeKvAnswer]:
        if self._status == ENGINE_LOST:
            raise aiohttp.ServerDisconnectedError
        if self._status == SENDER_LOST:
            try:
                async for _ in data:
                    pass
            except aiohttp.ClientPayloadError as error:
                # As aiohttp does.
                raise aiohttp.ClientConnectionError from error
        yield FakeKvAnswer(self._status, b"{}")


@pytest.mark.parametrize(
    ("status", "may_ask"),
    [(404, True), (429, True), (400, False), (ENGINE_LOST, True), (SENDER_LOST, False)],
)
async def test_a_holder_is_not_blamed_for_the_receiver(status: int, may_ask: bool) -> None:
    """One engine without free blocks stopped all fetches of its node for up to a minute; one that
    was lost stopped them for 8 s, and the windows of its node for 30 s.
    """
    peers = [PeerReplica(ReplicaId(name), NodeId(name), "", 200, 4000, 20_000) for name in "ab"]
    expected = kv_transfer.ExpectedPrompt(
        prompt_tokens=200,
        blocks=12,
        cached_blocks=0,
        held_blocks=0,
        block_tokens=16,
        block_bytes=1000,
        digests=tuple(bytes([number]) * 32 for number in range(12)),
    )
    rates, engine, user = FetchRates(), RefusingEngine(status), KvUser(DeploymentId("d"), "t")
    any_engine: Any = engine
    fetcher = PrefixFetcher(
        any_engine, FullHolder(), rates, KvQuota(NO_KV_LIMITS), user, lambda: 100.0
    )
    found = await fetcher.fetch("0" * 32, expected, KvHolders(peers[0], peers[1:], ""))
    assert found == FetchedPrefix("peer", 0, 0.0, has_moved=True)
    assert rates.of(NodeId("b")).may_ask(100.0) == may_ask
