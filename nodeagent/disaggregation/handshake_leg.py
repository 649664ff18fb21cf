"""Runs both legs of a request at engines that send each other KV by their vendor's protocol.

Rule 1: nothing is sent to the client before the decode engine has answered, so every failure of the
prefill leg leads to another prefill replica, or to the original request at this node's engine.
Rule 2: only the body changes. The driver defines its fields (drivers/handshake.py).
Rule 3: closing a leg's connection ends its work, and the KV that no engine fetched is released by
the prefill engine after a time that its driver sets.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.service.http_responses import read_response
from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import current_span
from isochrone.wire import codec
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_transfer
from isochrone.wire.kv.kv_transfer import KvAddress
from nodeagent import metrics
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.decide.requests.prefill_leg import (
    LegChoice,
    PrefillPlan,
    TransferRate,
    WaitingPromptSize,
    order_all,
)
from nodeagent.disaggregation.transfer_leg import (
    ENDED,
    FAILED,
    LegRefused,
    LegRequest,
    PrefillPeers,
    ask_queues,
    plan_leg,
    prefill_span,
)
from nodeagent.drivers.handshake import (
    Fields,
    Handshake,
    HandshakeFailed,
    cached_tokens,
    decode_fields,
)

ANSWER_BYTES_MAX: Final = 32 * 1024 * 1024
"""The limit of a prefill leg's answer. TensorRT-LLM's has all tokens of the prompt."""

ADDRESS_BYTES_MAX: Final = 4096
ADDRESS_TIMEOUT_S: Final = 2.0

AnswerContext = AbstractAsyncContextManager[aiohttp.ClientResponse]
PostToEngine = Callable[[bytes], AnswerContext]
"""Sends a body to this node's engine."""

_ADDRESS: Final = msgspec.json.Decoder(KvAddress)
_ANSWER: Final = msgspec.json.Decoder(dict[str, Any])
_FAILURES: Final = (
    LegRefused,
    HandshakeFailed,
    PeerReplicaLost,
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    codec.MalformedFrame,
)


class NoPrefillReplica(Exception):
    """The engine cannot read a prompt, and no prefill replica has read it."""


class DecodeEngineFailed(Exception):
    """This node's engine did not answer the decode leg: the client gets what it raised."""

    def __init__(self, error: aiohttp.ClientError | OSError) -> None:
        super().__init__(str(error))
        self.error = error


class HandshakeLeg:
    """The two legs of one request. Has the attributes of TransferLeg that describe the result."""

    fetched = None
    holders = None
    held_tokens = None

    def __init__(
        self,
        handshake: Handshake,
        peers: PrefillPeers,
        rate: TransferRate,
        request: LegRequest,
        clock: Callable[[], float],
    ) -> None:
        """`request.replicas` begins with the decode replica; its prompt is as the router counts."""
        self._handshake = handshake
        self._peers = peers
        self._rate = rate
        self._request = request
        self._clock = clock
        self.transfer = request.transfer
        self.received: kv_transfer.ReceivedBlocks | None = None
        self.received_s = 0.0
        self.read_at = ReplicaId("")
        """The prefill replica that read the prompt."""
        tokens = headers.parse_tokens(request.sent.get(headers.TOKENS, ""))
        uncached = request.replicas[0].pending_prefill_tokens
        prompt = max(uncached, tokens.prompt if tokens is not None else 0)
        self._size = WaitingPromptSize(prompt - uncached, uncached)
        self.expected = kv_transfer.ExpectedPrompt(
            prompt_tokens=prompt, blocks=0, cached_blocks=0, held_blocks=0, block_tokens=1
        )

    @asynccontextmanager
    async def answer(self, post: PostToEngine) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer of this node's engine, after the prompt was read elsewhere if it was.

        Raises NoPrefillReplica, and what `post` raises.
        """
        async with AsyncExitStack() as stack:
            yield await self._open(post, stack)

    async def close(self) -> None:
        """Do nothing: both legs end with `answer`."""

    def record_wait(self, wait_s: float) -> None:
        """Learn how long after the prompt was read the decode engine's first token came; of a
        leg that was given up, how long it took."""
        self._rate.record(self._size.uncached_tokens, wait_s, self._clock())

    async def _open(self, post: PostToEngine, stack: AsyncExitStack) -> aiohttp.ClientResponse:
        """Run the legs, and leave the answer of the last one open in `stack`."""
        request, span = self._request, current_span()
        outcome: str = ENDED
        try:
            fields = _fields_of(request.body)
            can_split = fields is not None and self._handshake.can_split(fields)
            plan = await self._plan() if can_split else PrefillPlan(LegChoice.NO_CANDIDATE)
            answer = await self._try_all(plan, fields or {}, post, stack)
            if answer is not None:
                outcome = LegChoice.PREFILL
                return answer
            outcome = FAILED if plan.candidates else plan.choice
        finally:
            metrics.PREFILL_LEGS.labels(request.deployment, outcome).inc()
            span.set(names.PREFILL_OUTCOME, outcome)
        if plan.candidates:
            await request.announce(request.replicas[0].replica_id)
        if self._handshake.needs_prefill and fields is not None:
            raise NoPrefillReplica(f"{len(plan.candidates)} prefill replicas were tried")
        return await stack.enter_async_context(post(request.body))

    async def _plan(self) -> PrefillPlan:
        """Decide where the prompt is read."""
        request, size = self._request, self._size
        if len(request.replicas) < 2:
            return PrefillPlan(LegChoice.NO_CANDIDATE)
        if self._handshake.needs_prefill:
            queues = await ask_queues(self._peers, request.replicas, size)
            return order_all(request.replicas, queues, size)
        return await plan_leg(self._peers, request, size, self._rate, self._clock())

    async def _try_all(
        self, plan: PrefillPlan, fields: Fields, post: PostToEngine, stack: AsyncExitStack
    ) -> aiohttp.ClientResponse | None:
        """Try the prefill replicas in order; return the decode engine's answer, None without."""
        for candidate in plan.candidates:
            await self._request.announce(candidate.replica_id)
            began_s = self._clock()
            async with AsyncExitStack() as attempt:
                try:
                    timeout_s = plan.timeout_before_s(self._request.deadline_s - began_s)
                    answer = await self._attempt(candidate, timeout_s, fields, post, attempt)
                except DecodeEngineFailed as failed:
                    raise failed.error from None
                except _FAILURES as error:
                    answer = None
                    took_s = self._clock() - began_s
                    if isinstance(error, TimeoutError) or plan.counts_as_late(took_s):
                        self.record_wait(took_s)
                if answer is not None:
                    stack.push_async_exit(attempt.pop_all())
                    return answer
            self.received = None
            metrics.PREFILL_ATTEMPTS_FAILED.inc()
        return None

    async def _attempt(
        self,
        candidate: PeerReplica,
        timeout_s: float,
        fields: Fields,
        post: PostToEngine,
        attempt: AsyncExitStack,
    ) -> aiohttp.ClientResponse | None:
        """Have one replica read the prompt; return the decode engine's answer.

        None if that engine refuses its leg. Raises one of _FAILURES if the prefill leg fails, and
        DecodeEngineFailed.
        """
        handshake, began_s, outside = self._handshake, self._clock(), copy_context()
        decoding: asyncio.Task[aiohttp.ClientResponse] | None = None
        with prefill_span(candidate):
            async with asyncio.timeout(timeout_s):
                address = await self._address(candidate) if handshake.needs_address else None
                body = handshake.prefill(fields, self.transfer, address)
                reading = asyncio.create_task(self._read_prompt(candidate, body))
                attempt.push_async_callback(_end, reading)
                if handshake.is_concurrent:
                    body = handshake.decode(fields, self.transfer, address, {})
                    # Both legs are steps of the request, and neither is one of the other.
                    decoding = asyncio.create_task(_decode(post, body, attempt), context=outside)
                    attempt.push_async_callback(_end, decoding)
                    await _either_problem(reading, decoding)
                prompt = await reading
        self.received_s = self._clock()
        metrics.PREFILL_LEG_SECONDS.observe(self.received_s - began_s)
        self.received = kv_transfer.ReceivedBlocks(
            blocks=0, transfer_bytes=0, cached_tokens=cached_tokens(prompt)
        )
        self.read_at = candidate.replica_id
        if decoding is not None:
            answer = await decoding
        else:
            body = handshake.decode(fields, self.transfer, address, prompt)
            answer = await _decode(post, body, attempt)
        return answer if answer.status < 400 else None

    async def _address(self, candidate: PeerReplica) -> KvAddress:
        """Ask the candidate's node where its engine is."""
        sent = {headers.REPLICA: candidate.replica_id}
        async with (
            asyncio.timeout(ADDRESS_TIMEOUT_S),
            self._peers.relay(candidate, kv_transfer.ADDRESS_PATH, b"", sent) as answer,
        ):
            if answer.status != 200:
                raise LegRefused(f"{candidate.replica_id} has no address for KV: {answer.status}")
            body = await read_response(answer, ADDRESS_BYTES_MAX)
            return codec.decode_json(body, _ADDRESS)

    async def _read_prompt(self, candidate: PeerReplica, body: Fields) -> Fields:
        """Send the prefill leg; return its answer."""
        request = self._request
        sent = {
            **request.sent,
            **candidate.estimate_headers,
            headers.TOKENS: f"p={self.expected.prompt_tokens};o=0",
            kv_transfer.LEG: kv_transfer.PREFILL_LEG,
        }
        current_span().add_to(sent)
        data = msgspec.json.encode(body)
        async with self._peers.relay(candidate, request.path, data, sent) as answer:
            if answer.status != 200:
                raise LegRefused(f"{candidate.replica_id} answered {answer.status}")
            received = await read_response(answer, ANSWER_BYTES_MAX)
        return codec.decode_json(received, _ANSWER, bytes_max=ANSWER_BYTES_MAX)


def _fields_of(body: bytes) -> Fields | None:
    """Return the fields of a request; None if the engine is to say what is wrong with it."""
    try:
        return decode_fields(body)
    except (ValueError, RecursionError):
        return None


async def _decode(
    post: PostToEngine, body: Fields, attempt: AsyncExitStack
) -> aiohttp.ClientResponse:
    """Send the decode leg to this node's engine; return its answer, open in `attempt`."""
    try:
        return await attempt.enter_async_context(post(msgspec.json.encode(body)))
    except (aiohttp.ClientError, OSError) as error:
        raise DecodeEngineFailed(error) from error


async def _either_problem(
    reading: asyncio.Task[Fields], decoding: asyncio.Task[aiohttp.ClientResponse]
) -> None:
    """Wait until the prompt is read, or one of the legs has failed."""
    waiting: set[asyncio.Task[Any]] = {reading, decoding}
    while not reading.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if decoding in done and decoding.result().status >= 400:
            raise LegRefused("the decode engine refused its leg")


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
