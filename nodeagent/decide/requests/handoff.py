"""Decides whether a request is handed off to a peer replica of the PoP that can start it sooner.

A router knows the requests it sent itself, but learns late of those that other routers sent at the
same time. The node that receives a request is one LAN round trip from all replicas of the PoP and
can read their current queues, so it takes the last step of the routing decision. A replica that
sleeps counts with the time that it needs to wake, because a router learns of a sleep late, too, and
one whose engine has no free sequence with the time until it has one.

The router also names replicas that may read the prompt or have its prefix. After a handoff they are
named as if the router had addressed the target: it may fetch what the first replica has cached.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from isochrone.wire.http.headers import (
    PEER_REPLICAS,
    PREFILL_REPLICAS,
    REPLICA,
    PeerReplica,
    parse_peer_replicas,
)
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv.kv_sharing import KV_HOLDERS, KV_KEEPER

MARGIN_MS: Final = 5.0
"""Time that a handoff must save: it costs a probe, a LAN round trip and one more relay."""


class PeerReplicaLost(Exception):
    """The peer replica refused the request, or its node does not answer."""


class Handoff(NamedTuple):
    """The replica that takes over a request, and the longest queue with which it is worth it."""

    target: PeerReplica
    queue_tokens_max: int


def estimated_ttft_ms(replica: PeerReplica, queued_tokens: int) -> float:
    """Return the expected time to first token with `queued_tokens` to be prefilled before it.

    The prefill counts as the router says, which adds what it charges and which replica it prefers.
    """
    return replica.prefill_ms + queued_tokens * replica.token_us / 1000


def queued_before(
    replica: PeerReplica, queued_tokens: int, wake_ms: int, sequence_wait_ms: float
) -> int:
    """Return the tokens that are queued before a request, and other waits as tokens.

    Queued prompts are read while the request waits for a sequence, but not before a wake.
    """
    token_us = max(1, replica.token_us)
    return max(queued_tokens, int(1000 * sequence_wait_ms) // token_us) + 1000 * wake_ms // token_us


def is_worth_probing(local: PeerReplica, queued_tokens: int) -> bool:
    """Return True if the local queue is long enough that a peer replica might start sooner.

    Here and below queued tokens are those of `queued_before`.
    """
    return queued_tokens * local.token_us / 1000 > MARGIN_MS


def choose_handoff(
    replicas: Sequence[PeerReplica],
    queued_tokens: Mapping[ReplicaId, int],
    queue_tokens_max: int | None,
) -> Handoff | None:
    """Return the handoff to the replica with the lowest expected TTFT, or None to keep the request.

    `replicas` begins with the local one. `queued_tokens` has it and each peer that answered a
    probe. `queue_tokens_max` is the longest queue that the router accepts at the local replica
    (None: any); a handoff must not take longer than that queue would.
    """
    local = replicas[0]
    limit_ms = estimated_ttft_ms(local, queued_tokens[local.replica_id]) - MARGIN_MS
    if queue_tokens_max is not None:
        limit_ms = min(limit_ms, estimated_ttft_ms(local, queue_tokens_max))
    known = [replica for replica in replicas[1:] if replica.replica_id in queued_tokens]
    if not known:
        return None
    best = min(known, key=lambda r: estimated_ttft_ms(r, queued_tokens[r.replica_id]))
    if estimated_ttft_ms(best, queued_tokens[best.replica_id]) > limit_ms:
        return None
    queue_tokens_max = int(1000 * (limit_ms - best.prefill_ms) / max(1, best.token_us))
    return Handoff(best, max(1, queue_tokens_max))


def named_replicas(sent: Mapping[str, str], own: ReplicaId) -> dict[str, str]:
    """Return the headers that name other replicas of the PoP for the one that answers, `own`.

    `sent` are those of the router. Each list begins with the replica that answers.
    """
    named = {name: sent[name] for name in (PREFILL_REPLICAS, KV_HOLDERS, KV_KEEPER) if name in sent}
    if not named or own == sent.get(REPLICA):
        return named
    peers = parse_peer_replicas(sent.get(PEER_REPLICAS, ""))
    target = [peer for peer in peers if peer.replica_id == own][:1]
    readers = parse_peer_replicas(named.pop(PREFILL_REPLICAS, ""))[1:]
    holders = parse_peer_replicas(named.pop(KV_HOLDERS, ""))
    holders = [peer for peer in holders if peer.replica_id != own]
    if target and readers:
        named[PREFILL_REPLICAS] = format_peer_replicas(target + readers)
    if target and holders:
        named[KV_HOLDERS] = format_peer_replicas(target + holders)
    return named
