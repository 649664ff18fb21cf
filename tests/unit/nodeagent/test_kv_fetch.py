"""Fetch or compute a prefix: decided from measured rates, within the link's budget."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.decide.kv_fetch import (
    COST_SHARE_MAX,
    OVERHEAD_S,
    FetchChoice,
    FetchRate,
    LinkBudget,
    MissingPrefix,
    PrefixHolder,
    plan_fetch,
)

MEBIBYTE = 1024 * 1024


def rate_of(bytes_per_s: float) -> FetchRate:
    rate = FetchRate()
    rate.record(int(bytes_per_s), 1.0)
    return rate


def a_holder(name: str, blocks: int, bytes_per_s: float = 1e9) -> PrefixHolder:
    peer = PeerReplica(ReplicaId(name), NodeId(name), f"{name}:1", 0, 0, 1)
    return PrefixHolder(peer, blocks, rate_of(bytes_per_s))


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
    plan = plan_fetch(a_prompt(), holders, inf)
    assert plan.peer is not None
    assert (plan.choice, plan.peer.replica_id, plan.blocks) == (FetchChoice.FETCH, "b", 80)
    # Not longer than computing would take: 80 blocks of 16 tokens, 1 ms each.
    assert plan.timeout_s == pytest.approx(1.28)


def test_a_nearer_holder_of_less_may_save_more() -> None:
    holders = [a_holder("slow", 90, 60e6), a_holder("fast", 80), a_holder("dead", 99, 1)]
    plan = plan_fetch(a_prompt(), holders, inf)
    assert plan.peer is not None
    assert (plan.peer.replica_id, plan.blocks) == ("fast", 70)


@pytest.mark.parametrize(
    ("prompt", "holders", "budget", "choice"),
    [
        (a_prompt(), [], inf, FetchChoice.NOT_HELD),
        (a_prompt(), [a_holder("a", 10)], inf, FetchChoice.NOT_HELD),
        (a_prompt(held_blocks=100), [a_holder("a", 900)], inf, FetchChoice.NOT_HELD),
        # 1 Mbit/s.
        (a_prompt(), [a_holder("a", 90, 125_000)], inf, FetchChoice.SLOW),
        (a_prompt(token_us=10), [a_holder("a", 90, 1e8)], inf, FetchChoice.SLOW),
        (a_prompt(), [a_holder("a", 90)], MEBIBYTE - 1, FetchChoice.BUDGET),
    ],
)
def test_a_fetch_is_refused_with_a_reason(
    prompt: MissingPrefix,
    holders: list[PrefixHolder],
    budget: float,
    choice: FetchChoice,
) -> None:
    plan = plan_fetch(prompt, holders, budget)
    assert (plan.choice, plan.peer, plan.blocks) == (choice, None, 0)


@given(
    blocks=st.integers(0, 300),
    counts=st.lists(st.integers(0, 400), max_size=4),
    held=st.integers(0, 300),
    block_bytes=st.integers(1, 10**7),
    token_us=st.integers(1, 10**5),
    bytes_per_s=st.integers(1, 10**10),
    budget=st.floats(0, 1e9),
)
def test_a_fetch_is_predicted_to_pay_and_keeps_to_the_budget(
    blocks: int,
    counts: list[int],
    held: int,
    block_bytes: int,
    token_us: int,
    bytes_per_s: int,
    budget: float,
) -> None:
    held = min(held, blocks)
    prompt = MissingPrefix(held, blocks, 16, block_bytes, token_us)
    holders = [a_holder(str(number), count, bytes_per_s) for number, count in enumerate(counts)]
    plan = plan_fetch(prompt, holders, budget)
    assert (plan.peer is None) == (plan.choice is not FetchChoice.FETCH)
    if plan.peer is None:
        return
    assert 0 < plan.blocks <= blocks - held
    assert plan.blocks * block_bytes <= budget
    assert held + plan.blocks <= max(counts)
    compute_s = plan.blocks * 16 * token_us / 1e6
    predicted_s = OVERHEAD_S + plan.blocks * block_bytes / bytes_per_s
    assert predicted_s < COST_SHARE_MAX * compute_s * (1 + 1e-9)
    assert plan.timeout_s >= compute_s * (1 - 1e-9)


def test_a_link_that_got_slow_is_believed_at_once_and_tried_again_in_time() -> None:
    rate = rate_of(1e9)
    rate.record(125_000, 1.0)
    assert rate.bytes_per_s == 125_000
    prompt, holders = a_prompt(), [a_holder("a", 90)._replace(rate=rate)]
    refusals = 0
    while plan_fetch(prompt, holders, inf).choice is FetchChoice.SLOW:
        refusals += 1
        assert refusals < 1000
    assert refusals > 100
    # One over which nothing came is not a link without a rate.
    rate.record(0, 1.0)
    assert rate.bytes_per_s > 0


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
