"""The decode replica's side of a request with two legs: when to open one, and what it changes."""

import secrets
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Final

from aiohttp import web

from isochrone.wire import headers
from isochrone.wire.ids import ReplicaId
from nodeagent import metrics
from nodeagent.api.answer_relay import EVENT_STREAM
from nodeagent.api.handoff_notice import announce_prefill
from nodeagent.decide.admission import TokenReservation
from nodeagent.decide.prefill_leg import (
    DecodeLoad,
    ExpectedDecoding,
    LegChoice,
    TransferRate,
    is_too_short,
)
from nodeagent.disaggregation.two_legs import LegRequest, PrefillLeg, PrefillPeers
from nodeagent.disaggregation.usage_rewriter import UsageRewriter, rewrite_json
from nodeagent.host.engines import EngineProcess
from nodeagent.supervisor import ManagedReplica

ONE_ENGINE_ONLY: Final = (headers.GENERATED_TOKENS, headers.SUSPECT)
"""Headers of requests without a prefill leg: the rest of an answer, whose prompt is mostly cached,
and a request that may make engines fail."""


class DecodeLegs:
    """Opens the prefill legs of the requests at this node's decode replicas."""

    def __init__(self, peers: PrefillPeers) -> None:
        self._peers = peers
        self._rates: dict[ReplicaId, TransferRate] = {}
        self._decoding: dict[ReplicaId, ExpectedDecoding] = {}

    def open(
        self,
        request: web.Request,
        replica: ManagedReplica,
        engine: EngineProcess,
        body: bytes,
        reservation: TokenReservation,
        names: Sequence[str],
    ) -> PrefillLeg | None:
        """Open a leg if the router names prefill replicas; None if the prompt is read here.

        `names` are the request's headers that go to a prefill replica.
        """
        replicas = headers.parse_peer_replicas(request.headers.get(headers.PREFILL_REPLICAS, ""))
        if len(replicas) < 2 or not engine.sends_kv:
            return None
        if any(name in request.headers for name in ONE_ENGINE_ONLY):
            return None
        if is_too_short(replicas[0]):
            metrics.PREFILL_LEGS.labels(LegChoice.SHORT).inc()
            return None
        own, admission = replica.spec.replica_id, replica.admission

        def load() -> DecodeLoad:
            queued = admission.pending_prefill_tokens(monotonic())
            before = max(0, queued - reservation.pending_prefill_tokens)
            return DecodeLoad(before, expected.record(admission.decoding))

        async def announce(replica_id: ReplicaId) -> None:
            reservation.set_prefill_elsewhere(replica_id != own)
            await announce_prefill(request, replica_id)

        if len(self._rates) > 2 * len(replicas) + 64:
            # Replicas come and go.
            self._rates.clear()
            self._decoding.clear()
        expected = self._decoding.setdefault(own, ExpectedDecoding())
        return PrefillLeg(
            engine.http,
            self._peers,
            self._rates.setdefault(own, TransferRate()),
            LegRequest(
                transfer=secrets.token_hex(16),
                path=request.path,
                body=body,
                sent={name: request.headers[name] for name in names if name in request.headers},
                replicas=replicas,
                load=load,
                announce=announce,
            ),
            monotonic,
        )


def apply_leg(
    leg: PrefillLeg | None, response: web.StreamResponse, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Return the answer's body with the usage of its prefill leg, if there was one."""
    if leg is None or leg.received is None:
        return chunks
    metrics.DECODE_WAIT_SECONDS.observe(monotonic() - leg.received_s)
    cached_tokens = leg.received.cached_tokens
    # Its length changes with the number.
    response.headers.pop("content-length", None)
    if response.headers.get("content-type", "").startswith(EVENT_STREAM):
        return _rewrite_stream(chunks, cached_tokens)
    return _rewrite_whole(chunks, cached_tokens)


async def _rewrite_stream(chunks: AsyncIterator[bytes], cached_tokens: int) -> AsyncIterator[bytes]:
    rewriter = UsageRewriter(cached_tokens)
    async for chunk in chunks:
        yield rewriter.feed(chunk)
    yield rewriter.flush()


async def _rewrite_whole(chunks: AsyncIterator[bytes], cached_tokens: int) -> AsyncIterator[bytes]:
    yield rewrite_json(b"".join([chunk async for chunk in chunks]), cached_tokens)
