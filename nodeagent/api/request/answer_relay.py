"""Relays an engine's or a peer node's answer to the router, and refuses requests."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent import metrics
from nodeagent.api.request.engine_trials import EngineRequest
from nodeagent.host.engines.open_session import EngineStopped
from nodeagent.managed_replica import ManagedReplica

WHOLE_BODY_BYTES_MAX: Final = 512 * 1024
FROM_ENGINE: Final = (
    "content-type",
    "retry-after",
    "cache-control",
    kv_sharing.KV_FOUND,
    kv_transfer.WINDOW,
    headers.PROMPT_TOKENS,
)
"""Headers of an engine's answer that are relayed."""

FROM_PEER: Final = (*FROM_ENGINE, kv_sharing.FETCH_MS, headers.LOAD, headers.ENGINE_LOST)
"""Headers of another node's answer that are relayed."""

NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, EngineStopped)
"""The errors of a request that did not reach its engine."""

EVENT_STREAM: Final = "text/event-stream"
ENGINE_LOST_EVENT: Final = b"data: " + msgspec.json.encode(
    {"error": {"code": headers.ENGINE_LOST_CODE, "message": "the engine failed"}}
) + b"\n\n"  # fmt: skip
"""Ends a stream, between two frames, whose request may have made the engine fail."""

GRAMMAR_MESSAGE: Final = (
    "cannot follow the grammar or schema of the request: after the text so far no token fits it"
)
GRAMMAR_EVENT: Final = b"data: " + msgspec.json.encode(
    {"error": {"code": ErrorCode.INVALID_REQUEST.value, "message": GRAMMAR_MESSAGE}}
)  # fmt: skip


def request_data(body: bytes) -> bytes | BytesIO:
    """Return a body to send; a large one in pieces, so that other requests go on between them."""
    return body if len(body) < WHOLE_BODY_BYTES_MAX else BytesIO(body)


def response_head(answer: aiohttp.ClientResponse, names: Sequence[str]) -> web.StreamResponse:
    """Return a response with the status, length and named headers of `answer`.

    Headers with other characters than ASCII's are left out: they could not be sent.
    """
    response = web.StreamResponse(status=answer.status)
    for name in names:
        value = answer.headers.get(name)
        if value is not None and value.isascii() and value.isprintable():
            response.headers[name] = value
    if answer.content_length is not None:
        response.content_length = answer.content_length
    return response


def refuse_grammar(status: int, first_chunk: bytes, grammar_error: bytes) -> None:
    """Raise ApiError 400 if an engine's 500 says that no token can follow the request's grammar.

    Routers would try other replicas, and count a failure of each.
    """
    if status == 500 and grammar_error and grammar_error in first_chunk:
        raise ApiError(ErrorCode.INVALID_REQUEST, GRAMMAR_MESSAGE)


def with_grammar_blamed(chunks: AsyncIterator[bytes], grammar_error: bytes) -> AsyncIterator[bytes]:
    """Return an answer whose event with `grammar_error` blames the request instead."""
    return _with_grammar_blamed(chunks, grammar_error) if grammar_error else chunks


async def _with_grammar_blamed(
    chunks: AsyncIterator[bytes], grammar_error: bytes
) -> AsyncIterator[bytes]:
    event = re.compile(rb'data: \{"error":[^\n]*' + re.escape(grammar_error) + rb"[^\n]*")
    async for chunk in chunks:
        yield event.sub(GRAMMAR_EVENT, chunk) if grammar_error in chunk else chunk


def is_first_token(answer: aiohttp.ClientResponse, output_tokens: int) -> bool:
    """Return whether an answer's first chunk comes with the first token of at most that many."""
    is_streamed = answer.content_type == EVENT_STREAM
    return answer.status == 200 and (is_streamed or not output_tokens)


async def count_bytes(
    first_chunk: bytes, chunks: AsyncIterator[bytes], replica: ManagedReplica
) -> AsyncIterator[bytes]:
    """Yield the first chunk and the rest, adding their size to the replica's `bytes_out`."""
    if first_chunk:
        replica.bytes_out += len(first_chunk)
        yield first_chunk
    async for chunk in chunks:
        replica.bytes_out += len(chunk)
        yield chunk


async def relay_body(
    request: web.Request,
    response: web.StreamResponse,
    chunks: AsyncIterator[bytes],
    outcome: str,
    running: EngineRequest | None = None,
) -> None:
    """Send an answer's head and relay its body; count its outcome.

    The connection is aborted if the source breaks. If that is an engine, and `running` is blamed
    for its failure, a stream ends with ENGINE_LOST_EVENT instead. A router that has disconnected is
    not taken for an engine that failed, neither at the head nor at the end.
    """
    chunk = b""
    try:
        await response.prepare(request)
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
    except aiohttp.ClientConnectionResetError:
        metrics.REQUESTS.labels("client_disconnected").inc()
        return
    except aiohttp.ClientError:
        # The router must see an abort, not a regular end: the answer is incomplete.
        metrics.REQUESTS.labels("engine_failed").inc()
        is_blamed = running is not None and await running.is_blamed()
        if is_blamed and response.content_type == EVENT_STREAM and chunk.endswith(b"\n\n"):
            with suppress(ConnectionError, aiohttp.ClientConnectionResetError):
                await response.write(ENGINE_LOST_EVENT)
                await response.write_eof()
            return
        if request.transport is not None:
            request.transport.abort()
        return
    metrics.REQUESTS.labels(outcome).inc()


async def loss_headers(running: EngineRequest, error: Exception) -> dict[str, str]:
    """Return the headers of the answer to a request whose engine failed before its first byte."""
    # Its prompt may have been read elsewhere while the engine ended.
    was_sent = not isinstance(error, NOT_SENT)
    return {headers.ENGINE_LOST: "1"} if was_sent and await running.is_blamed() else {}


def refusal(word: str, status: int, load: str = "") -> web.Response:
    """Return a refusal with its word as a header and a retry delay of one second."""
    error = {"error": {"code": "refused", "message": f"cannot serve the request: {word}"}}
    response = web.Response(
        status=status,
        body=msgspec.json.encode(error),
        content_type="application/json",
        headers={headers.REFUSED: word, "retry-after": "1"},
    )
    if load:
        response.headers[headers.LOAD] = load
    return response
