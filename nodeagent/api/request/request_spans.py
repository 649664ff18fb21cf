"""The node's spans of a traced request: around the whole of it, and around the engine's answer.

A node records what a router records: the sampled flag of the `traceparent` decides.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import NO_SPAN, SpanRecorder, child_span, current_span
from isochrone.service.tracing.spans import SpanKind
from isochrone.wire.engines.engine_times import ENGINE_TIMES, parse_times
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.trace_context import parse_traceparent
from isochrone.wire.ids import NodeId
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent.api.inference_paths import INFERENCE_PATHS
from nodeagent.disaggregation.handshake_leg import AnswerContext

TRACED: Final = {
    **dict.fromkeys(INFERENCE_PATHS, "serve"),
    kv_sharing.LOCATE_PATH: "locate kv",
    kv_sharing.BLOCKS_PATH: "send kv",
}
"""The names of the spans by path."""

ENGINE_STEPS: Final = {
    "wait_kv": "engine wait kv",
    "queue": "engine queue",
    "prefill": "engine prefill",
    "decode": "engine decode",
}
"""The names of the spans by the engine's step. They end where the head of its answer came."""


def trace_requests(recorder: SpanRecorder, node_id: NodeId) -> Middleware:
    """Return the middleware that records a span of each traced request."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = TRACED.get(request.path)
        parent = parse_traceparent(request.headers.get(headers.TRACEPARENT, ""))
        if name is None or parent is None or not parent.is_sampled:
            return await handler(request)
        with recorder.request(parent, name, SpanKind.SERVER) as span:
            span.set(names.NODE, node_id)
            span.set(names.REPLICA, request.headers.get(headers.REPLICA, ""))
            if headers.REQUEST_ID in request.headers:
                span.set(names.REQUEST_ID, request.headers[headers.REQUEST_ID])
            if kv_transfer.LEG in request.headers:
                span.set(names.LEG, request.headers[kv_transfer.LEG])
            response = await handler(request)
            span.set(names.STATUS, response.status)
            refused = response.headers.get(headers.REFUSED, "")
            if refused:
                span.set(names.REFUSED, refused)
            if refused or response.status >= 500:
                span.fail(refused or str(response.status))
            return response

    return trace


@asynccontextmanager
async def handoff_span(target: PeerReplica, sent: dict[str, str]) -> AsyncIterator[None]:
    """Record that a peer replica's node serves the request, whose headers are `sent`."""
    with child_span("handoff", SpanKind.CLIENT) as span:
        span.set(names.NODE, target.node_id)
        span.set(names.REPLICA, target.replica_id)
        span.add_to(sent)
        yield


class PostToEngine(Protocol):
    """Sends a request with the given headers to this node's engine."""

    def __call__(self, *, headers: Mapping[str, str]) -> AnswerContext:
        """Return the context of its answer."""


def traced_answer(post: PostToEngine, sent: Mapping[str, str]) -> AnswerContext:
    """Return the context of an engine's answer, as a step of the request if it is traced.

    The engine's own spans belong to this step.
    """
    if current_span() is NO_SPAN:
        return post(headers=sent)
    return _in_a_span(post, dict(sent))


@asynccontextmanager
async def _in_a_span(
    post: PostToEngine, sent: dict[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    name = "compute kv" if kv_transfer.LEG in sent else "decode"
    with child_span(name, SpanKind.CLIENT) as span:
        span.add_to(sent)
        async with post(headers=sent) as answer:
            span.set(names.STATUS, answer.status)
            times = parse_times(answer.headers.get(ENGINE_TIMES, ""))
            span.record([(ENGINE_STEPS[name], seconds) for name, seconds in times.steps()])
            yield answer
