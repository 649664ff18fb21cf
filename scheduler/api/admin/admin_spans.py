"""A span of each admin request, and of the planner's answer within it.

A request with a `traceparent` is recorded if its sampled flag is set. Requests without it are
recorded if they may change something: they are few, and those that only read may be a dashboard's.
"""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import SpanRecorder
from isochrone.service.tracing.spans import SpanKind
from isochrone.wire.errors import ApiError
from isochrone.wire.http import headers
from isochrone.wire.http.trace_context import TraceContext, parse_traceparent

READING: Final = frozenset({"GET", "HEAD"})
TRACE_ID_BYTES: Final = 16


def trace_admin_requests(recorder: SpanRecorder, scheduler_name: str) -> Middleware:
    """Return the middleware that records a span of each admin request.

    It comes after the middleware that checks the token, so requests without it are not recorded.
    """

    def parent_of(request: web.Request) -> TraceContext | None:
        context = parse_traceparent(request.headers.get(headers.TRACEPARENT, ""))
        if context is not None:
            return context if context.is_sampled else None
        is_reading = request.method in READING
        return None if is_reading else TraceContext(recorder.new_id(TRACE_ID_BYTES), "")

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        parent, resource = parent_of(request), request.match_info.route.resource
        if parent is None or resource is None:
            return await handler(request)
        # The path's pattern, so that spans of one kind have one name.
        name = f"{request.method} {resource.canonical}"
        with recorder.request(parent, name, SpanKind.SERVER) as span:
            span.set(names.SCHEDULER, scheduler_name)
            try:
                response = await handler(request)
            except ApiError as error:
                span.set(names.STATUS, error.meaning.status)
                span.fail(error.code.value)
                # Ends before the error leaves it, which would name the exception's class.
                span.end()
                raise
            span.set(names.STATUS, response.status)
            return response

    return trace
