"""What a door knows of the replicas around it moves a request on only where that is sooner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.decide.handoff import (
    MARGIN_MS,
    Handoff,
    choose_handoff,
    estimated_ttft_ms,
    is_worth_probing,
)


def a_sibling(
    name: str, prefill_ms: int = 100, token_us: int = 1000, unread: int = 90
) -> PeerReplica:
    return PeerReplica(ReplicaId(name), NodeId(name), f"{name}:1", unread, prefill_ms, token_us)


A, B, C = a_sibling("a"), a_sibling("b"), a_sibling("c", prefill_ms=40)


@pytest.mark.parametrize(
    ("unread", "queue_tokens_max", "taker"),
    [
        ({"a": 200, "b": 0, "c": 200}, None, "b"),
        ({"a": 200, "b": 100, "c": 150}, None, "c"),  # more waits there, but more of it is cached
        ({"a": 200, "b": 197, "c": 300}, None, ""),  # no more than the margin
        ({"a": 200, "b": 0}, None, "b"),  # c is silent
        ({"a": 200}, None, ""),
        ({"a": 200, "b": 90, "c": 200}, 100, "b"),  # the router puts up with 100 ms
        ({"a": 200, "b": 110, "c": 200}, 100, ""),  # and not with 110: it is turned away
    ],
)
def test_who_takes_a_request(
    unread: dict[str, int], queue_tokens_max: int | None, taker: str
) -> None:
    told = {ReplicaId(name): tokens for name, tokens in unread.items()}
    verdict = choose_handoff([A, B, C], told, queue_tokens_max)
    assert (verdict.sibling.replica_id if verdict else "") == taker


def test_where_nothing_waits_nobody_is_asked() -> None:
    assert not is_worth_probing(A, 0)
    assert not is_worth_probing(A, int(MARGIN_MS))
    assert is_worth_probing(A, 20)


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 50_000), st.integers(0, 9000)),
        min_size=1,
        max_size=4,
    ),
    st.none() | st.integers(0, 10_000),
)
def test_it_is_always_sooner_there_as_long_as_no_more_waits_than_is_told(
    drawn: list[tuple[int, int, int]], queue_tokens_max: int | None
) -> None:
    siblings = [a_sibling(str(n), ms, us) for n, (ms, us, _) in enumerate(drawn)]
    unread = {ReplicaId(str(n)): waiting for n, (_, _, waiting) in enumerate(drawn)}
    verdict = choose_handoff(siblings, unread, queue_tokens_max)
    if verdict is None:
        return
    here = siblings[0]
    assert isinstance(verdict, Handoff) and verdict.sibling is not here
    limit_ms = estimated_ttft_ms(here, unread[here.replica_id]) - MARGIN_MS
    if queue_tokens_max is not None:
        limit_ms = min(limit_ms, estimated_ttft_ms(here, queue_tokens_max))
    assert estimated_ttft_ms(verdict.sibling, unread[verdict.sibling.replica_id]) <= limit_ms
    if verdict.queue_tokens_max > 1:
        assert estimated_ttft_ms(verdict.sibling, verdict.queue_tokens_max) <= limit_ms + 1e-6
