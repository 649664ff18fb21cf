"""Where a prompt is read: on the decode replica, or on a prefill replica of the PoP."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.decide.requests.prefill_leg import (
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
    return plan_prefill(PEERS, known, size, local, rate or TransferRate())


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
    assert rate.after_ms(4000) == 0
    rate.record(1000, 100_000_000, 0.01)
    assert plan({"p1": 0}, LONG, busy, rate).choice is LegChoice.PREFILL
    # One Mbit/s: 100 MB take 800 s.
    for _ in range(20):
        rate.record(1000, 100_000_000, 800.0)
    assert plan({"p1": 0}, LONG, busy, rate).choice is LegChoice.SHORT
    rate.record(0, 0, 5.0)


def test_without_a_prefill_replica_there_is_no_leg() -> None:
    found = plan_prefill([HERE], {}, LONG, DecodeLoad(0, 9), TransferRate())
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
