"""Runs the prefill leg of a request whose engine takes blocks of KV from this agent.

Before that, or without it, the prefix that other replicas of the PoP have is fetched (kv_fetch).

The engine holds the request until its KV has arrived, or until it is ordered to compute the prompt
itself. So every way in which a prefill leg can end lets the request begin.

Rule 1: the leg is decided once the engine knows the prompt's size and what it has cached.
Rule 2: prefill replicas are tried one after the other. Blocks that arrived before a transfer broke
are kept.
Rule 3: the leg ends with its request: closing its connection ends the work at the prefill replica.
Rule 4: a leg that is late leaves the time to compute the prompt here before its deadline.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from math import inf
from typing import Final, Protocol

import aiohttp
import msgspec

from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import AnySpan, child_span, current_span
from isochrone.service.tracing.spans import SpanKind
from isochrone.wire import codec
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_transfer
from nodeagent import metrics
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.decide.requests.prefill_leg import (
    DecodeLoad,
    LegChoice,
    PrefillPlan,
    TransferRate,
    WaitingPromptSize,
    plan_prefill,
    probe_timeout_s,
)
from nodeagent.disaggregation.kv_fetch import (
    FetchedPrefix,
    KvHolders,
    LeaseWindow,
    PrefixFetcher,
    RelayToPeer,
)
from nodeagent.disaggregation.kv_windows import WindowLease
from nodeagent.host.engines.open_session import open_session, read_answer

ENGINE_TIMEOUT_S: Final = 5.0
"""The longest wait for the engine's answer to the order to begin."""

BEGIN_ATTEMPTS_MAX: Final = 40
BEGIN_PAUSE_S: Final = 0.05
BEGIN_PAUSE_MAX_S: Final = 2.0
"""The order to begin is repeated for more than a minute: a busy engine may not have read the
request when its description was given up."""

UNKNOWN_TRANSFER: Final = 404
"""The engine's answer while it does not know the request, or no longer."""

FAILED: Final = "failed"
ENDED: Final = "ended"
"""The outcome of a leg whose request ended before."""

_EXPECTED: Final = msgspec.json.Decoder(kv_transfer.ExpectedPrompt)
_RECEIVED: Final = msgspec.json.Decoder(kv_transfer.ReceivedBlocks)


class LegRefused(Exception):
    """A prefill replica or the decode engine did not complete the transfer."""


class PrefillPeers(RelayToPeer, Protocol):
    """Connections to the nodes of prefill replicas."""

    async def queued_tokens(
        self, replicas: Sequence[PeerReplica], timeout_s: float = 0.0
    ) -> dict[ReplicaId, int]:
        """Return the pending prefill tokens of each replica whose node answers in time."""


def prefill_span(candidate: PeerReplica) -> AnySpan:
    """Return the step in which a replica reads the prompt; use it in a `with`."""
    span = child_span("prefill", SpanKind.CLIENT)
    span.set(names.NODE, candidate.node_id)
    span.set(names.REPLICA, candidate.replica_id)
    return span


async def ask_queues(
    peers: PrefillPeers, replicas: Sequence[PeerReplica], size: WaitingPromptSize
) -> dict[ReplicaId, int]:
    """Return the queues of the prefill replicas whose nodes answer in time.

    `replicas` begins with the decode replica itself.
    """
    with child_span("ask prefill nodes", SpanKind.CLIENT):
        return await peers.queued_tokens(replicas[1:], probe_timeout_s(replicas[0], size))


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request at the decode replica: the fields sent to a prefill replica, and the candidates.

    `replicas` begins with the decode replica itself. `announce` tells the router which replica
    reads the prompt.
    """

    transfer: str
    deployment: str
    """The name of the deployment, for metrics."""
    path: str
    body: bytes
    sent: Mapping[str, str]
    replicas: Sequence[PeerReplica]
    load: Callable[[], DecodeLoad]
    holders: KvHolders | None = None
    """Replicas of the PoP that may have the prompt's prefix."""
    deadline_s: float = inf
    """The time by which the answer must have begun, on the clock of the leg."""
    lease_window: LeaseWindow = lambda _: nullcontext(WindowLease())
    """Leases a window to a transfer from the named replica, if that is on this node."""
    set_waiting: Callable[[bool], None] = lambda is_waiting: None
    """Called with whether the engine waits for KV, and has nothing to compute for this request."""
    announce: Callable[[ReplicaId], Awaitable[None]]


async def plan_leg(
    peers: PrefillPeers,
    request: LegRequest,
    size: WaitingPromptSize,
    rate: TransferRate,
    now_s: float,
) -> PrefillPlan:
    """Decide where a prompt is read.

    The prefill replicas' nodes are asked for their queues only if these matter: a prompt that is
    read here even if no prefill replica has a queue waits for no answer.
    """
    replicas, load = request.replicas, request.load()
    without_queues = {peer.replica_id: 0 for peer in replicas[1:]}
    plan = plan_prefill(replicas, without_queues, size, load, rate, now_s)
    if not plan.candidates:
        return plan
    queues = await ask_queues(peers, replicas, size)
    return plan_prefill(replicas, queues, size, load, rate, now_s)


class TransferLeg:
    """The prefill leg of one request; `close` it in every case."""

    def __init__(
        self,
        engine: aiohttp.ClientSession,
        peers: PrefillPeers,
        rate: TransferRate,
        request: LegRequest,
        clock: Callable[[], float],
        fetcher: PrefixFetcher,
    ) -> None:
        """Start the leg for a request that is sent to `engine` with this transfer's id."""
        self._fetcher = fetcher
        self._engine = engine
        self._peers = peers
        self._rate = rate
        self._request = request
        self._clock = clock
        self.transfer = request.transfer
        self._path = kv_transfer.TRANSFERS_PATH + request.transfer
        self.received: kv_transfer.ReceivedBlocks | None = None
        """The blocks that arrived; None until the transfer is complete."""
        self.received_s = 0.0
        self.held_tokens: int | None = None
        """What the engine had of the prompt before prefill replicas were tried; None if none was.
        Blocks that a broken transfer has brought were computed for this request."""
        self.read_at = ReplicaId("")
        """The prefill replica that read the prompt."""
        self.fetched: FetchedPrefix | None = None
        """The part of the prompt's prefix that another replica had."""
        self.expected: kv_transfer.ExpectedPrompt | None = None
        """The prompt, as soon as the engine has described it."""
        self._is_closing = False
        self._task = asyncio.create_task(self._run())

    @property
    def holders(self) -> KvHolders | None:
        """The replicas that the router named for the prompt's prefix."""
        return self._request.holders

    async def close(self) -> None:
        """End the leg, with or after its request."""
        self._is_closing = True
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        """Decide, and try the prefill replicas; then let the engine begin."""
        outcome: str = ENDED
        try:
            expected = self.expected = await self._describe()
            if expected is not None and self._request.holders is not None:
                expected = await self._fetch_prefix(expected, self._request.holders)
            if expected is None or len(self._request.replicas) < 2:
                outcome = FAILED
            else:
                outcome = await self._read_elsewhere(expected)
        finally:
            if len(self._request.replicas) > 1:
                metrics.PREFILL_LEGS.labels(self._request.deployment, outcome).inc()
                current_span().set(names.PREFILL_OUTCOME, outcome)
            if self.received is None:
                await self._begin_alone()

    async def _fetch_prefix(
        self, expected: kv_transfer.ExpectedPrompt, holders: KvHolders
    ) -> kv_transfer.ExpectedPrompt | None:
        """Fetch what other replicas of the PoP have of the prompt; return what is left of it."""
        self._request.set_waiting(True)
        try:
            with child_span("fetch kv", SpanKind.CLIENT):
                fetched = self.fetched = await self._fetcher.fetch(
                    self.transfer, expected, holders, self._request.deadline_s
                )
        finally:
            self._request.set_waiting(False)
        if fetched is None or not fetched.has_moved:
            return expected
        left = await self._describe()
        if left is not None:
            # The engine knows what arrived, also of a fetch that failed.
            arrived = left.held_blocks - expected.held_blocks
            self.fetched = fetched._replace(blocks=max(0, arrived))
        return left

    async def _read_elsewhere(self, expected: kv_transfer.ExpectedPrompt) -> str:
        """Have the prompt read on a prefill replica; return what came of it."""
        request = self._request
        size = WaitingPromptSize(
            expected.held_blocks * expected.block_tokens,
            (expected.blocks - expected.held_blocks) * expected.block_tokens,
        )
        plan = await plan_leg(self._peers, request, size, self._rate, self._clock())
        if plan.candidates:
            self.held_tokens = size.cached_tokens
        for candidate in plan.candidates:
            await request.announce(candidate.replica_id)
            began_s = self._clock()
            try:
                with prefill_span(candidate) as span:
                    left_s = request.deadline_s - began_s
                    async with asyncio.timeout(plan.timeout_before_s(left_s)):
                        received = await self._transfer(candidate, expected)
                    span.set(names.CACHED_TOKENS, received.cached_tokens)
            except (LegRefused, PeerReplicaLost, aiohttp.ClientError, OSError) as error:
                metrics.PREFILL_ATTEMPTS_FAILED.inc()
                now_s = self._clock()
                if isinstance(error, TimeoutError) or plan.counts_as_late(now_s - began_s):
                    self._rate.record(size.uncached_tokens, now_s - began_s, now_s)
                if await self._describe() is None:
                    # The answer has begun: another prefill replica would read the prompt in vain.
                    break
                continue
            self.received_s = self._clock()
            self.received = received
            self.read_at = candidate.replica_id
            metrics.PREFILL_LEG_SECONDS.observe(self.received_s - began_s)
            metrics.KV_TRANSFER_BYTES.inc(received.transfer_bytes)
            metrics.KV_TRANSFER_SECONDS.observe(received.after_prefill_ms / 1000)
            self._rate.record(
                received.blocks * expected.block_tokens,
                received.after_prefill_ms / 1000,
                self.received_s,
            )
            return LegChoice.PREFILL
        if plan.candidates:
            await request.announce(request.replicas[0].replica_id)
            return FAILED
        return plan.choice

    async def _describe(self) -> kv_transfer.ExpectedPrompt | None:
        """Return the prompt's size once the engine knows it; None if it does not say."""
        try:
            path = self._path if self._request.holders is None else f"{self._path}?digests=1"
            async with open_session(self._engine).get(path) as answer:
                if answer.status != 200:
                    return None
                return codec.decode_json(await read_answer(answer), _EXPECTED)
        except (aiohttp.ClientError, OSError, codec.MalformedFrame):
            return None

    async def _transfer(
        self, candidate: PeerReplica, expected: kv_transfer.ExpectedPrompt
    ) -> kv_transfer.ReceivedBlocks:
        """Have one replica read the prompt, and pass its KV to the engine as it comes."""
        request = self._request
        sent = {
            **request.sent,
            **candidate.estimate_headers,
            headers.TOKENS: f"p={expected.prompt_tokens};o=0",
            kv_transfer.LEG: kv_transfer.PREFILL_LEG,
            kv_transfer.TRANSFER: request.transfer,
            kv_transfer.FIRST_BLOCK: str(expected.cached_blocks),
        }
        if expected.kv_format:
            sent[kv_transfer.KV_FORMAT] = expected.kv_format
        current_span().add_to(sent)
        with request.lease_window(candidate.replica_id) as lease:
            sent |= lease.to_sender
            return await self._relay(candidate, sent, lease, expected.block_bytes)

    async def _relay(
        self,
        candidate: PeerReplica,
        sent: Mapping[str, str],
        lease: WindowLease,
        block_bytes: int,
    ) -> kv_transfer.ReceivedBlocks:
        """Request the blocks, and pass them to the engine."""
        request = self._request
        async with self._peers.relay(candidate, request.path, request.body, sent) as leg:
            if leg.status == kv_transfer.OTHER_FORMAT_STATUS:
                metrics.KV_OTHER_FORMAT.labels("prefill").inc()
            if leg.status != 200 or leg.content_type != kv_transfer.CONTENT_TYPE:
                raise LegRefused(f"{candidate.replica_id} answered {leg.status}")
            lease = lease.answered_with(leg.headers)
            blocks = _pieces(leg.content)
            with child_span("transfer kv") as span:
                engine = open_session(self._engine)
                async with (
                    lease.passed_on(leg, blocks, block_bytes) as sent_on,
                    engine.post(self._path, data=sent_on.pieces, headers=sent_on.headers) as answer,
                ):
                    body = await read_answer(answer)
                    if answer.status != 200:
                        if answer.status not in kv_transfer.RECEIVER_STATUSES:
                            lease.record_failure()
                        raise LegRefused(f"the engine answered {answer.status}")
                received = _received(body)
                span.set(names.REPLICA, candidate.replica_id)
                span.set(names.KV_BYTES, received.transfer_bytes)
                span.set(names.KV_BLOCKS, received.blocks)
                span.set(names.KV_AFTER_PREFILL_S, received.after_prefill_ms / 1000)
                return received

    async def _begin_alone(self) -> None:
        """Tell the engine to compute what has not arrived.

        The order is repeated if the engine is too busy to answer in time, or does not know the
        request yet: it would wait forever. The leg ends with its request.
        """
        for attempt in range(BEGIN_ATTEMPTS_MAX):
            if self._engine.closed:
                return
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                engine = open_session(self._engine)
                async with (
                    asyncio.timeout(ENGINE_TIMEOUT_S),
                    engine.delete(self._path) as answer,
                ):
                    if answer.status != UNKNOWN_TRANSFER:
                        return
            if self._is_closing:
                # A request that has ended waits for nothing, and the engine may have hung.
                return
            await asyncio.sleep(min(BEGIN_PAUSE_MAX_S, BEGIN_PAUSE_S * 2**attempt))


def _received(body: bytes) -> kv_transfer.ReceivedBlocks:
    """Decode the engine's account of a transfer; raise LegRefused if it sent none."""
    try:
        return codec.decode_json(body, _RECEIVED)
    except codec.MalformedFrame as error:
        raise LegRefused("the engine sent no result") from error


async def _pieces(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield what has arrived, in pieces of any size."""
    async for piece in content.iter_any():
        yield piece
