"""The prefill leg of a request at its decode replica: when it is opened, and what it changes.

A leg brings KV of the prompt to this replica's engine: a prefill replica reads the prompt, or the
prefix comes from another replica or the PoP's store. Once the request is answered, a copy of the
prompt's KV is made for others.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import Final, NamedTuple

from aiohttp import web

from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import current_span
from isochrone.wire.digits import parse_digits
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.kv_store import uses_kv_store
from nodeagent import metrics
from nodeagent.api.inference_paths import GENERATION_PATHS
from nodeagent.api.request.answer_relay import EVENT_STREAM
from nodeagent.api.request.handoff_notice import announce_prefill
from nodeagent.api.request.request_estimates import prefill_estimate
from nodeagent.decide.requests.admission import TokenReservation
from nodeagent.decide.requests.handoff import named_replicas
from nodeagent.decide.requests.kv_quota import KvQuota, KvUser
from nodeagent.decide.requests.prefill_leg import (
    DecodeLoad,
    ExpectedDecoding,
    LegChoice,
    TransferRate,
    is_too_short,
)
from nodeagent.disaggregation.handshake_leg import AnswerContext, HandshakeLeg
from nodeagent.disaggregation.kv_fetch import (
    FetchRates,
    KvHolders,
    PrefixFetcher,
    parse_holders,
)
from nodeagent.disaggregation.kv_windows import WindowLeases
from nodeagent.disaggregation.prompt_copies import (
    KeeperCopies,
    PromptForKeeper,
    PromptForStore,
    StoreCopies,
)
from nodeagent.disaggregation.store_fetch import StoreFetch
from nodeagent.disaggregation.transfer_leg import LegRequest, PrefillPeers, TransferLeg
from nodeagent.disaggregation.usage_rewriter import UsageRewriter, rewrite_json
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.managed_replica import ManagedReplica

PrefillLeg = TransferLeg | HandshakeLeg
"""One for engines that take blocks from this agent, one for those that move KV by themselves."""

ONE_ENGINE_ONLY: Final = (headers.GENERATED_TOKENS, headers.SUSPECT)
"""Headers of requests without a prefill leg: the rest of an answer, whose prompt is mostly cached,
and a request that may make engines fail."""


class NamedPeers(NamedTuple):
    """The replicas that a router names beside the one that it chose.

    `readers` could read the prompt; the first is the chosen one. `holders` may have its prefix.
    """

    readers: Sequence[PeerReplica]
    holders: KvHolders | None


class PrefillLegs:
    """Opens the prefill legs of the requests at this node's decode replicas."""

    def __init__(self, peers: PrefillPeers, quota: KvQuota, windows: WindowLeases) -> None:
        """`quota` is the node's for KV of other replicas, `windows` for KV of its own."""
        self._windows = windows
        self._peers = peers
        self._quota = quota
        self._store_copies = StoreCopies(quota, monotonic)
        self._keeper_copies = KeeperCopies(peers, monotonic)
        self._fetch_rates = FetchRates()
        self._rates: dict[ReplicaId, TransferRate] = {}
        self._decoding: dict[ReplicaId, ExpectedDecoding] = {}

    def open(
        self,
        request: web.Request,
        replica: ManagedReplica,
        engine: EngineProcess,
        body: bytes,
        reservation: TokenReservation,
        sent_on: Sequence[str],
    ) -> PrefillLeg | None:
        """Open a leg if the router names prefill replicas, or others that may have the prefix.

        Return None if the prompt is read here. `sent_on` are the request's headers that go to a
        prefill replica.
        """
        others = _named_peers(request, replica, engine)
        if others is None:
            return None
        own, admission = replica.spec.replica_id, replica.admission

        def load() -> DecodeLoad:
            queued = admission.pending_prefill_tokens(monotonic())
            before = max(0, queued - reservation.pending_prefill_tokens)
            return DecodeLoad(before, expected.record(admission.decoding))

        async def announce(replica_id: ReplicaId) -> None:
            reservation.set_prefill_elsewhere(replica_id != own)
            await announce_prefill(request, replica_id)

        if len(self._rates) > 2 * len(others.readers) + 64:
            # Replicas come and go.
            self._rates.clear()
            self._decoding.clear()
        expected = self._decoding.setdefault(own, ExpectedDecoding())
        leg_request = LegRequest(
            transfer=secrets.token_hex(16),
            deployment=replica.spec.name,
            path=request.path,
            body=body,
            sent={name: request.headers[name] for name in sent_on if name in request.headers},
            replicas=others.readers or [PeerReplica(own, NodeId(""), "", 0, 0, 0)],
            load=load,
            announce=announce,
            holders=others.holders,
            deadline_s=_deadline_s(request, reservation.admitted_s),
            lease_window=lambda source: self._windows.lease(source, replica),
            set_waiting=reservation.set_prefill_elsewhere,
        )
        rate = self._rates.setdefault(own, TransferRate())
        if engine.handshake is not None:
            return HandshakeLeg(engine.handshake, self._peers, rate, leg_request, monotonic)
        fetcher = self._fetcher(request, replica, engine)
        return TransferLeg(engine.http, self._peers, rate, leg_request, monotonic, fetcher)

    def offer_copy(
        self,
        request: web.Request,
        replica: ManagedReplica,
        engine: EngineProcess,
        leg: PrefillLeg | None,
    ) -> None:
        """Have a copy made of a prompt that was answered, if the PoP keeps copies of it."""
        if leg is None or leg.expected is None:
            return
        digests, holders = leg.expected.digests, leg.holders
        if uses_kv_store(replica.spec.engine):
            stored = PromptForStore(engine.http, _kv_user(request, replica), digests)
            self._store_copies.offer(stored)
            return
        for peer in holders.others if holders is not None else ():
            if holders is not None and peer.replica_id == holders.keeper:
                self._keeper_copies.offer(PromptForKeeper(holders.here, peer, digests))
                return

    async def close(self) -> None:
        """Make no more copies."""
        await self._store_copies.close()
        await self._keeper_copies.close()

    def _fetcher(
        self, request: web.Request, replica: ManagedReplica, engine: EngineProcess
    ) -> PrefixFetcher:
        return PrefixFetcher(
            engine.http,
            self._peers,
            self._fetch_rates,
            self._quota,
            _kv_user(request, replica),
            monotonic,
            lambda source: self._windows.lease(source, replica),
            self._store_of(replica, engine),
        )

    def _store_of(self, replica: ManagedReplica, engine: EngineProcess) -> StoreFetch | None:
        if not uses_kv_store(replica.spec.engine):
            return None
        return StoreFetch(engine.http, self._fetch_rates.store, monotonic)


def _kv_user(request: web.Request, replica: ManagedReplica) -> KvUser:
    return KvUser(replica.spec.deployment_id, request.headers.get(headers.CACHE_SALT, ""))


def _named_peers(
    request: web.Request, replica: ManagedReplica, engine: EngineProcess
) -> NamedPeers | None:
    """Return the replicas that may help with the prompt; None if it is read here alone."""
    handshake = engine.handshake
    needs_prefill = handshake is not None and handshake.needs_prefill
    is_alone = any(name in request.headers for name in ONE_ENGINE_ONLY) and not needs_prefill
    if is_alone or not (engine.sends_kv or handshake is not None):
        return None
    if kv_transfer.LEG in request.headers or request.path not in GENERATION_PATHS:
        return None
    own = replica.spec.replica_id
    named = named_replicas(request.headers, own)
    holders = None
    if handshake is None:
        sent, keeper = named.get(kv_sharing.KV_HOLDERS, ""), named.get(kv_sharing.KV_KEEPER, "")
        holders = parse_holders(sent, keeper)
        if holders is None and uses_kv_store(replica.spec.engine):
            holders = _only_store(request, own)
    readers = headers.parse_peer_replicas(named.get(headers.PREFILL_REPLICAS, ""))
    if len(readers) > 1 and is_too_short(readers[0]) and not needs_prefill:
        metrics.PREFILL_LEGS.labels(replica.spec.name, LegChoice.SHORT).inc()
        current_span().set(names.PREFILL_OUTCOME, LegChoice.SHORT.value)
        readers = []
    if len(readers) < 2 and holders is None and not needs_prefill:
        return None
    return NamedPeers(readers, holders)


def _only_store(request: web.Request, own: ReplicaId) -> KvHolders | None:
    """Return the holders of a prompt whose prefix only the PoP's store may have.

    None for a prompt that is computed faster than a query of the store takes.
    """
    tokens, prefill_ms = prefill_estimate(request)
    token_us = 1000 * prefill_ms // max(1, tokens or 0)
    here = PeerReplica(own, NodeId(""), "", tokens or 0, prefill_ms, token_us)
    return None if is_too_short(here) else KvHolders(here, (), ReplicaId(""))


def answer_context(
    leg: PrefillLeg | None,
    post: Callable[[bytes, Mapping[str, str]], AnswerContext],
    body: bytes,
    sent: Mapping[str, str],
) -> AnswerContext:
    """Return the context of the engine's answer, with the leg's part of the request.

    `post` sends a body without the tenant's salt to the engine.
    """
    if isinstance(leg, HandshakeLeg):
        return leg.answer(lambda changed: post(changed, sent))
    if leg is not None:
        sent = {**sent, kv_transfer.TRANSFER: leg.transfer}
    return post(body, sent)


def report_found(leg: PrefillLeg | None, response: web.StreamResponse) -> None:
    """Say in the answer's head where the prompt was read and its cached tokens were found; count
    those."""
    found = kv_sharing.parse_found(response.headers.pop(kv_sharing.KV_FOUND, ""))
    if leg is not None and leg.fetched is not None:
        response.headers[kv_sharing.FETCH_MS] = str(round(1000 * leg.fetched.waited_s))
    if leg is not None and leg.held_tokens is not None:
        found = found.limited(leg.held_tokens)
    if leg is not None and leg.expected is not None:
        if leg.received is not None:
            response.headers[headers.READ_AT] = leg.read_at
            # All of it came from the prefill replica; this is what that one had.
            found = kv_sharing.FoundTokens(device=leg.received.cached_tokens)
        elif leg.fetched is not None and leg.fetched.blocks:
            tokens = leg.fetched.blocks * leg.expected.block_tokens
            found = found.moved(leg.fetched.place, tokens)
    formatted = kv_sharing.format_found(found)
    if not formatted:
        return
    response.headers[kv_sharing.KV_FOUND] = formatted
    for place, tokens in kv_sharing.found_places(found):
        metrics.KV_FOUND_TOKENS.labels(place).inc(tokens)


def _deadline_s(request: web.Request, admitted_s: float) -> float:
    """Return the monotonic time by which the request must have begun to answer.

    Since it was admitted it may have waited for a seat of the engine, or for the engine to wake.
    """
    deadline_ms = parse_digits(request.headers.get(headers.DEADLINE_MS, ""))
    return inf if deadline_ms is None else admitted_s + deadline_ms / 1000


def apply_leg(
    leg: PrefillLeg | None, response: web.StreamResponse, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Return the answer's body with the usage of its prefill leg, if there was one."""
    if leg is None:
        return chunks
    received = leg.received
    cached_tokens = leg.held_tokens if received is None else received.cached_tokens
    if cached_tokens is None:
        return chunks
    # Its length changes with the number.
    response.headers.pop("content-length", None)
    is_stream = response.headers.get("content-type", "").startswith(EVENT_STREAM)
    if received is not None and is_stream:
        # The head of another answer comes after its last token.
        wait_s = monotonic() - leg.received_s
        metrics.DECODE_WAIT_SECONDS.observe(wait_s)
        current_span().set(names.DECODE_WAIT_S, wait_s)
        if isinstance(leg, HandshakeLeg):
            leg.record_wait(wait_s)
    rewrite = _rewrite_stream if is_stream else _rewrite_whole
    return rewrite(chunks, cached_tokens, received is None)


async def _rewrite_stream(
    chunks: AsyncIterator[bytes], cached_tokens: int, is_most: bool
) -> AsyncIterator[bytes]:
    rewriter = UsageRewriter(cached_tokens, is_most=is_most)
    async for chunk in chunks:
        yield rewriter.feed(chunk)
    yield rewriter.flush()


async def _rewrite_whole(
    chunks: AsyncIterator[bytes], cached_tokens: int, is_most: bool
) -> AsyncIterator[bytes]:
    body = b"".join([chunk async for chunk in chunks])
    yield rewrite_json(body, cached_tokens, is_most=is_most)
