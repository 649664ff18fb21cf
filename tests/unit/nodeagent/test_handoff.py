"""A request is handed off only to a peer replica that starts it sooner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv.kv_sharing import KV_HOLDERS, KV_KEEPER
from nodeagent.decide.requests.handoff import (
    MARGIN_MS,
    Handoff,
    choose_handoff,
    estimated_ttft_ms,
    is_worth_probing,
    named_replicas,
    queued_before,
)


def a_peer(
    name: str, prefill_ms: int = 100, token_us: int = 1000, pending: int = 90
) -> PeerReplica:
    return PeerReplica(ReplicaId(name), NodeId(name), f"{name}:1", pending, prefill_ms, token_us)


A, B, C = a_peer("a"), a_peer("b"), a_peer("c", prefill_ms=40)


@pytest.mark.parametrize(
    ("queued", "queue_tokens_max", "target"),
    [
        ({"a": 200, "b": 0, "c": 200}, None, "b"),
        (
            {"a": 200, "b": 100, "c": 150},
            None,
            "c",
        ),  # a longer queue, but more of the prompt is cached
        ({"a": 200, "b": 197, "c": 300}, None, ""),  # saves less than the margin
        ({"a": 200, "b": 0}, None, "b"),  # c did not answer the probe
        ({"a": 200}, None, ""),
        ({"a": 200, "b": 90, "c": 200}, 100, "b"),  # the router accepts 100 ms
        ({"a": 200, "b": 110, "c": 200}, 100, ""),  # and not 110 ms
    ],
)
def test_the_target_of_a_handoff(
    queued: dict[str, int], queue_tokens_max: int | None, target: str
) -> None:
    queued_tokens = {ReplicaId(name): tokens for name, tokens in queued.items()}
    handoff = choose_handoff([A, B, C], queued_tokens, queue_tokens_max)
    assert (handoff.target.replica_id if handoff else "") == target


def test_peers_are_not_probed_while_the_local_queue_is_short() -> None:
    assert not is_worth_probing(A, 0)
    assert not is_worth_probing(A, int(MARGIN_MS))
    assert is_worth_probing(A, 20)


def test_the_time_to_wake_counts_like_a_queue_of_that_length() -> None:
    fast = a_peer("fast", token_us=500)
    for peer in (A, fast):
        asleep = queued_before(peer, 7, wake_ms=120, sequence_wait_ms=0)
        waits_ms = estimated_ttft_ms(peer, asleep) - estimated_ttft_ms(peer, 7)
        assert waits_ms == 120
    assert queued_before(A, 7, wake_ms=0, sequence_wait_ms=0) == 7
    queues = {A.replica_id: queued_before(A, 0, 300, 0), B.replica_id: 100}
    handoff = choose_handoff([A, B], queues, None)
    assert handoff is not None
    assert handoff.target is B


def test_the_time_until_a_sequence_is_free_counts_beside_the_prompts_that_are_read_meanwhile() -> (
    None
):
    fast = a_peer("fast", token_us=500)
    assert queued_before(fast, 7, wake_ms=0, sequence_wait_ms=120.4) == 240
    assert queued_before(fast, 900, wake_ms=0, sequence_wait_ms=120.4) == 900
    assert queued_before(fast, 900, wake_ms=10, sequence_wait_ms=120.4) == 920
    queues = {A.replica_id: queued_before(A, 0, 0, 300), B.replica_id: 100}
    handoff = choose_handoff([A, B], queues, None)
    assert handoff is not None
    assert handoff.target is B


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 50_000), st.integers(0, 9000)),
        min_size=1,
        max_size=4,
    ),
    st.none() | st.integers(0, 10_000),
)
def test_a_handoff_always_starts_sooner_within_its_queue_limit(
    drawn: list[tuple[int, int, int]], queue_tokens_max: int | None
) -> None:
    replicas = [a_peer(str(n), ms, us) for n, (ms, us, _) in enumerate(drawn)]
    queued_tokens = {ReplicaId(str(n)): waiting for n, (_, _, waiting) in enumerate(drawn)}
    handoff = choose_handoff(replicas, queued_tokens, queue_tokens_max)
    if handoff is None:
        return
    local = replicas[0]
    assert isinstance(handoff, Handoff) and handoff.target is not local
    limit_ms = estimated_ttft_ms(local, queued_tokens[local.replica_id]) - MARGIN_MS
    if queue_tokens_max is not None:
        limit_ms = min(limit_ms, estimated_ttft_ms(local, queue_tokens_max))
    assert estimated_ttft_ms(handoff.target, queued_tokens[handoff.target.replica_id]) <= limit_ms
    if handoff.queue_tokens_max > 1:
        assert estimated_ttft_ms(handoff.target, handoff.queue_tokens_max) <= limit_ms + 1e-6


@pytest.mark.parametrize(
    ("own", "readers", "holders"),
    [
        (A, [A, C], [A, B]),  # no handoff
        (B, [B, C], [B, A]),  # the first replica may have the prefix, and B asks itself no more
        (a_peer("unknown"), [], []),
    ],
)
def test_after_a_handoff_other_replicas_are_named_for_its_target(
    own: PeerReplica, readers: list[PeerReplica], holders: list[PeerReplica]
) -> None:
    sent = {
        headers.REPLICA: "a",
        headers.PEER_REPLICAS: format_peer_replicas([A, B]),
        headers.PREFILL_REPLICAS: format_peer_replicas([A, C]),
        KV_HOLDERS: format_peer_replicas([A, B]),
        KV_KEEPER: "b",
    }
    named = named_replicas(sent, own.replica_id)
    assert headers.parse_peer_replicas(named.get(headers.PREFILL_REPLICAS, "")) == readers
    assert headers.parse_peer_replicas(named.get(KV_HOLDERS, "")) == holders


def test_a_request_without_other_replicas_has_none_after_a_handoff() -> None:
    peers = format_peer_replicas([A, B])
    sent = {headers.REPLICA: "a", headers.PEER_REPLICAS: peers}
    assert named_replicas(sent, B.replica_id) == {}
