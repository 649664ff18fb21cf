"""Where a prompt is read: on the decode replica, or on a prefill replica of the PoP."""

from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.decide.requests.prefill_leg import (
    AGING_S,
    DELAY_WEIGHT,
    MARGIN_MS,
    PROBE_S_MAX,
    TIMEOUT_MIN_S,
    DecodeLoad,
    ExpectedDecoding,
    LegChoice,
    PrefillPlan,
    TransferRate,
    WaitingPromptSize,
    is_too_short,
    plan_prefill,
    probe_timeout_s,
)


def a_peer(name: str, token_us: int = 100, tokens: int = 4000) -> PeerReplica:
    return PeerReplica(
        ReplicaId(name), NodeId(name), f"{name}:1", tokens, tokens * token_us // 1000, token_us
    )


HERE = a_peer("d")
PEERS = [HERE, a_peer("p1"), a_peer("p2")]
LONG = WaitingPromptSize(0, 4000)
IDLE = DecodeLoad(0, 0)


def plan(
    queues: dict[str, int],
    size: WaitingPromptSize = LONG,
    local: DecodeLoad = IDLE,
    rate: TransferRate | None = None,
) -> PrefillPlan:
    known = {ReplicaId(name): tokens for name, tokens in queues.items()}
    return plan_prefill(PEERS, known, size, local, rate or TransferRate(), 0.0)


@pytest.mark.parametrize(
    ("queues", "size", "local", "choice", "first"),
    [
        # Nothing decodes here: reading there would only add a transfer.
        ({"p1": 0, "p2": 0}, LONG, IDLE, LegChoice.IDLE, ""),
        ({"p1": 0, "p2": 0}, LONG, DecodeLoad(0, 1), LegChoice.PREFILL, "p1"),
        ({"p1": 0, "p2": 0}, LONG, DecodeLoad(4000, 0), LegChoice.PREFILL, "p1"),
        ({"p1": 3000, "p2": 100}, LONG, DecodeLoad(0, 1), LegChoice.PREFILL, "p2"),
        ({"p2": 100}, LONG, DecodeLoad(0, 1), LegChoice.PREFILL, "p2"),
        ({}, LONG, DecodeLoad(0, 1), LegChoice.NO_CANDIDATE, ""),
        # A wait there is shorter than what pauses of the answers here are worth, up to a point.
        ({"p1": 500, "p2": 700}, LONG, DecodeLoad(0, 1), LegChoice.PREFILL, "p1"),
        ({"p1": 1900, "p2": 1900}, LONG, DecodeLoad(0, 1), LegChoice.BUSY, ""),
        # However many decode, it is not longer than twice the time that reading here takes.
        ({"p1": 7000, "p2": 7500}, LONG, DecodeLoad(0, 30), LegChoice.PREFILL, "p1"),
        ({"p1": 9000, "p2": 9000}, LONG, DecodeLoad(0, 30), LegChoice.BUSY, ""),
        ({"p1": 0, "p2": 0}, WaitingPromptSize(3990, 10), DecodeLoad(0, 8), LegChoice.CACHED, ""),
        ({"p1": 0, "p2": 0}, WaitingPromptSize(0, 1), DecodeLoad(0, 8), LegChoice.SHORT, ""),
    ],
)
def test_the_prompt_is_read_where_that_costs_least(
    queues: dict[str, int],
    size: WaitingPromptSize,
    local: DecodeLoad,
    choice: LegChoice,
    first: str,
) -> None:
    found = plan(queues, size, local)
    assert found.choice is choice
    assert [peer.replica_id for peer in found.candidates[:1]] == ([first] if first else [])


def test_a_slow_link_keeps_prompts_here() -> None:
    rate, busy = TransferRate(), DecodeLoad(0, 1)
    assert rate.after_ms(4000, 100, 0.0) == 0
    rate.record(1000, 0.01, 0.0)
    assert plan({"p1": 0}, LONG, busy, rate).choice is LegChoice.PREFILL
    # One Mbit/s: 100 MB take 800 s.
    for _ in range(20):
        rate.record(1000, 800.0, 0.0)
    assert plan({"p1": 0}, LONG, busy, rate).choice is LegChoice.SHORT
    rate.record(0, 5.0, 0.0)
    # It is tried again in time, else it would never be measured again.
    assert rate.after_ms(4000, 100, AGING_S - 1) > 700_000
    assert rate.after_ms(4000, 100, AGING_S) == 0


def test_a_late_leg_leaves_the_time_to_read_the_prompt_here() -> None:
    found = plan({"p1": 0}, LONG, DecodeLoad(1000, 1))
    assert (found.expected_s, found.here_s) == pytest.approx((0.4 + MARGIN_MS / 1000, 0.5))
    assert found.timeout_before_s(inf) == found.timeout_s == TIMEOUT_MIN_S
    assert found.timeout_before_s(1.5) == 1.0
    # A leg has the time that it was expected to take, and all of it if reading here is too late.
    assert found.timeout_before_s(0.6) == found.expected_s
    assert found.timeout_before_s(0.4) == found.timeout_s


def test_without_a_prefill_replica_there_is_no_leg() -> None:
    found = plan_prefill([HERE], {}, LONG, DecodeLoad(0, 9), TransferRate(), 0.0)
    assert found == PrefillPlan(LegChoice.NO_CANDIDATE)


def test_a_prompt_of_less_than_a_millisecond_needs_no_thought() -> None:
    assert is_too_short(a_peer("d", 100, 4))
    assert not is_too_short(a_peer("d", 100, 400))


@given(
    queues=st.dictionaries(st.sampled_from(["p1", "p2"]), st.integers(0, 100_000)),
    cached=st.integers(0, 10_000),
    uncached=st.integers(0, 100_000),
    queued=st.integers(0, 100_000),
    decoding=st.integers(0, 300),
)
def test_candidates_are_known_in_order_and_have_time(
    queues: dict[str, int], cached: int, uncached: int, queued: int, decoding: int
) -> None:
    found = plan(queues, WaitingPromptSize(cached, uncached), DecodeLoad(queued, decoding))
    names = [str(peer.replica_id) for peer in found.candidates]
    assert set(names) <= set(queues)
    assert (found.choice is LegChoice.PREFILL) == bool(names)
    assert [queues[name] for name in names] == sorted(queues[name] for name in names)
    assert not names or found.timeout_s >= TIMEOUT_MIN_S


def test_a_probe_takes_a_share_of_what_reading_here_takes() -> None:
    assert probe_timeout_s(HERE, LONG) == pytest.approx(0.04)
    assert probe_timeout_s(HERE, WaitingPromptSize(4000, 0)) == 0
    assert probe_timeout_s(HERE, WaitingPromptSize(0, 10**9)) == PROBE_S_MAX


def test_a_replica_that_is_idle_for_a_moment_expects_to_decode() -> None:
    expected = ExpectedDecoding()
    assert expected.record(0) == 0
    for _ in range(20):
        assert expected.record(4) == 4
    assert 2 < expected.record(0) < 4
    for _ in range(40):
        last = expected.record(0)
    assert last < 0.01


def test_in_a_busy_time_an_idle_replica_has_prompts_read_elsewhere() -> None:
    queues = {"p1": 0, "p2": 0}
    assert plan(queues, local=DecodeLoad(0, 0.0)).choice is LegChoice.IDLE
    assert plan(queues, local=DecodeLoad(0, 0.5)).choice is LegChoice.PREFILL


class Link(NamedTuple):
    """A link whose transfers end as the simulator's do (`ops/sim/role_replica.py`)."""

    fixed_ms: float
    token_ms: float
    """The time to move the KV of a token."""
    chunk_tokens: int = 512

    def after_ms(self, tokens: int, read_ms: float) -> float:
        """Return how much longer than reading its prompt a transfer takes."""
        moving_ms, last = tokens * self.token_ms, min(tokens, self.chunk_tokens) * self.token_ms
        return self.fixed_ms + max(last, moving_ms - read_ms)


TOKEN_US = 100
"""What a replica of these tests needs for a prompt token."""


def leg_cost_ms(tokens: int, decoding: int, link: Link) -> tuple[float, float]:
    """Return the cost of reading a prompt here, and at an idle prefill replica."""
    read_ms = tokens * TOKEN_US / 1000
    return read_ms * (1 + DELAY_WEIGHT * decoding), read_ms + link.after_ms(tokens, read_ms)


LINKS = {
    "window": Link(4, 0.002),
    "25 Gbit/s": Link(6, 0.05),
    # A third of what the prefill replica computes passes, then a tenth.
    "slow": Link(5, 0.3),
    "1 Gbit/s": Link(5, 1.0),
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@given(
    learnt=st.lists(st.sampled_from([64, 200, 700, 1500, 4000, 9000]), max_size=20),
    shorts=st.lists(st.sampled_from([64, 200]), max_size=6),
    tokens=st.integers(64, 16_000),
    decoding=st.integers(0, 8),
)
def test_a_leg_is_chosen_where_it_costs_less_as_measured(
    link: Link, learnt: list[int], shorts: list[int], tokens: int, decoding: int
) -> None:
    """Short prompts taught that transfers of long ones take as many times longer."""
    rate = TransferRate()
    for size in (*learnt, 700, 9000, *shorts):
        rate.record(size, link.after_ms(size, size * TOKEN_US / 1000) / 1000, 0.0)
    here_ms, there_ms = leg_cost_ms(tokens, decoding, link)
    found = plan_prefill(
        [a_peer(name, TOKEN_US, tokens) for name in ("d", "p1")],
        {ReplicaId("p1"): 0},
        WaitingPromptSize(0, tokens),
        DecodeLoad(0, decoding),
        rate,
        0.0,
    )
    chosen_ms = there_ms if found.choice is LegChoice.PREFILL else here_ms
    # Where both cost about the same, either is right.
    slack_ms = link.chunk_tokens * link.token_ms
    assert chosen_ms <= 1.1 * min(here_ms, there_ms) + MARGIN_MS + slack_ms


def is_leg_chosen(rate: TransferRate, tokens: int, decoding: int) -> bool:
    replicas = [a_peer(name, TOKEN_US, tokens) for name in ("d", "p1")]
    size, load = WaitingPromptSize(0, tokens), DecodeLoad(0, decoding)
    found = plan_prefill(replicas, {ReplicaId("p1"): 0}, size, load, rate, 0.0)
    return found.choice is LegChoice.PREFILL


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@given(
    shorts=st.lists(st.tuples(st.integers(64, 400), st.floats(0, 20)), max_size=40),
    tokens=st.integers(1000, 16_000),
    decoding=st.integers(1, 8),
)
def test_a_long_prompt_after_short_ones_has_the_leg_that_it_is_worth(
    link: Link, shorts: list[tuple[int, float]], tokens: int, decoding: int
) -> None:
    """A refused leg is not measured, so that a refusal has to be right; one wrong leg is enough.

    The short transfers are late by up to 20 ms.
    """
    rate = TransferRate()
    for size, late_ms in shorts:
        after_ms = link.after_ms(size, size * TOKEN_US / 1000) + late_ms
        rate.record(size, after_ms / 1000, 0.0)
    here_ms, there_ms = leg_cost_ms(tokens, decoding, link)
    if not is_leg_chosen(rate, tokens, decoding):
        assert here_ms <= 1.1 * there_ms + MARGIN_MS + 20
        return
    rate.record(tokens, (there_ms - tokens * TOKEN_US / 1000) / 1000, 0.0)
    assert is_leg_chosen(rate, tokens, decoding) == (there_ms + MARGIN_MS < here_ms)


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@given(
    tokens=st.integers(64, 9000),
    decoding=st.integers(0, 8),
    longs=st.lists(st.integers(1000, 9000), min_size=1, max_size=20),
)
def test_a_short_prompt_among_long_ones_has_the_leg_that_it_is_worth(
    link: Link, tokens: int, decoding: int, longs: list[int]
) -> None:
    """A line through long and short transfers took short ones for longer than they are."""
    rate = TransferRate()
    for size in (*longs, tokens, *longs):
        rate.record(size, link.after_ms(size, size * TOKEN_US / 1000) / 1000, 0.0)
    here_ms, there_ms = leg_cost_ms(tokens, decoding, link)
    found = is_leg_chosen(rate, tokens, decoding)
    chosen_ms, other_ms = (there_ms, here_ms) if found else (here_ms, there_ms)
    # An average over all lengths between two powers of two is wrong by half of them at most.
    assert chosen_ms <= 1.1 * other_ms + MARGIN_MS + tokens * link.token_ms / 2


def test_a_link_is_told_by_prompts_of_every_length_and_each_length_ages() -> None:
    rate = TransferRate()
    rate.record(9000, 5.0, 0.0)
    rate.record(100, 0.010, AGING_S - 1)
    assert rate.after_ms(9000, TOKEN_US, AGING_S - 1) == 5000
    # Short prompts go on to be measured, but the long one counts no more.
    assert rate.after_ms(9000, TOKEN_US, AGING_S) == 10
    rate.record(9000, 0.012, AGING_S)
    assert rate.after_ms(9000, TOKEN_US, AGING_S) == 12


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1000)), min_size=1, max_size=40))
def test_a_transfer_is_predicted_within_what_was_measured(
    transfers: list[tuple[int, float]],
) -> None:
    rate = TransferRate()
    for tokens, after_s in transfers:
        rate.record(tokens, after_s, 0.0)
    slowest_ms = 1000 * max(after_s for _, after_s in transfers)
    sizes = (0, 1, min(tokens for tokens, _ in transfers), 10**6, 10**7)
    predicted = [rate.after_ms(tokens, TOKEN_US, 0.0) for tokens in sizes]
    assert all(0 <= after_ms < inf for after_ms in predicted)
    assert max(predicted[:3]) <= slowest_ms * (1 + 1e-9)
    assert predicted[3] <= predicted[4]


def test_a_short_prompt_says_little_of_the_transfer_of_a_long_one() -> None:
    rate = TransferRate()
    # Measured on a busy machine: 64 tokens ended after 22 ms, a thousand after 10.
    rate.record(64, 0.022, 0.0)
    assert rate.after_ms(16_000, 20, 0.0) == pytest.approx(22)
    rate.record(1008, 0.010, 0.0)
    assert rate.after_ms(16_000, TOKEN_US, 0.0) < 22
    # A link that takes longer than computing is told by transfers of one length.
    slow = TransferRate()
    slow.record(1000, 0.8, 0.0)
    assert slow.after_ms(10_000, TOKEN_US, 0.0) == pytest.approx(800 + 0.675 * 9000)
