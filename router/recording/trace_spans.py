"""Decides which requests are traced, and makes the router's spans of a request that has ended.

A traced request is the span of its arrival to its end, with a span for each attempt, which is the
parent of the node's spans, one for each wait in the admission queue, and one for the images that it
links to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from isochrone.service.tracing import names
from isochrone.service.tracing.spans import AttributeValue, Sampling, Span, SpanKind
from isochrone.wire.http.trace_context import TraceContext, parse_traceparent
from isochrone.wire.ids import PopId
from router.inference_request import InferenceRequest
from router.recording.request_trace import AttemptTrace, CapacityWait, RequestTrace
from router.request_context import OUTCOME_COMPLETE, ReplicaAttempt, RequestContext

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""OpenTelemetry's names; every other route is named by the last part of its path."""


@dataclass(eq=False)
class RequestTracer:
    """Begins and ends the traces of a router's requests.

    `draw` returns a random number from 0 up to 1, `new_id(n)` `n` random bytes in hexadecimal;
    `clock` is monotonic.
    """

    sampling: Sampling
    pop: PopId
    export: Callable[[Sequence[Span]], None]
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    draw: Callable[[], float]
    new_id: Callable[[int], str]

    def begin(self, request: InferenceRequest) -> RequestTrace | None:
        """Return the trace of a request, None if it is not traced.

        The trace of a client whose choice does not count is not continued but linked. If such a
        request is not traced, its `traceparent` goes on without the sampled flag: nodes and engines
        follow it.
        """
        client = parse_traceparent(request.traceparent) if request.traceparent else None
        sampling = self.sampling
        if not sampling.includes(client, self.draw()):
            if client is not None and client.is_sampled:
                unsampled = TraceContext(client.trace_id, self.new_id(8), is_sampled=False)
                request.traceparent = unsampled.traceparent
            return None
        span_id = self.new_id(8)
        if client is not None and sampling.follows_clients:
            return RequestTrace(TraceContext(client.trace_id, span_id), client.span_id, None)
        return RequestTrace(TraceContext(self.new_id(16), span_id), "", client)

    def begin_attempt(self, context: RequestContext, attempt: ReplicaAttempt) -> None:
        """Note an attempt that is sent now."""
        trace = context.trace
        if trace is not None:
            generated, target = context.stream.generated.tokens, attempt.target
            trace.attempts.append(
                AttemptTrace(self.new_id(8), target, target, attempt.sent_at_s, generated)
            )

    def add_wait(self, context: RequestContext, began_s: float) -> None:
        """Note a wait for capacity that ends now; a request looks for it several times a second."""
        trace = context.trace
        if trace is None:
            return
        attempt_index, now_s = len(trace.attempts), self.clock()
        if trace.waits and trace.waits[-1].attempt_index == attempt_index:
            trace.waits[-1].ended_s = now_s
        else:
            wait = CapacityWait(self.new_id(8), attempt_index, began_s, now_s)
            trace.waits.append(wait)

    def add_fetch(self, context: RequestContext, began_s: float) -> None:
        """Note that the images which a request links to were fetched until now."""
        if context.trace is not None:
            context.trace.fetch = CapacityWait(self.new_id(8), 0, began_s, self.clock())

    def end_attempt(
        self, context: RequestContext, attempt: ReplicaAttempt, error: str = ""
    ) -> None:
        """Note the end of the last attempt, with the cause of its failure if it failed."""
        trace = context.trace
        if trace is None or not trace.attempts or trace.attempts[-1].ended_at_s:
            return
        ended = trace.attempts[-1]
        ended.answered_by, ended.prefill_id = attempt.ranked, attempt.prefill_id or ""
        ended.ended_at_s, ended.error = self.clock(), error
        if context.times.attempt_token_at_s >= ended.sent_at_s:
            ended.first_token_at_s = context.times.attempt_token_at_s

    def end(self, context: RequestContext) -> None:
        """Export the spans of a request that ends now."""
        trace = context.trace
        if trace is None:
            return
        if context.attempt is not None:
            self.end_attempt(context, context.attempt)
        now_s = self.clock()
        offset_s = self.unix_clock() - now_s
        self.export(request_spans(context, trace, self.pop, now_s, offset_s))


def request_spans(
    context: RequestContext, trace: RequestTrace, pop: PopId, now_s: float, offset_s: float
) -> list[Span]:
    """Return the spans of a request that ends at `now_s`; `offset_s` later it is Unix time."""
    request, outcome = context.request, context.outcome
    attributes = _request_attributes(context, trace, pop)
    error = trace.error
    if not error and outcome is not OUTCOME_COMPLETE:
        error = outcome.value
    arrival = Span(
        context=trace.context,
        parent_id=trace.parent_id,
        name=f"{attributes[names.OPERATION]} {request.deployment.name}",
        kind=SpanKind.SERVER,
        began_s=offset_s + request.arrived_s,
        ended_s=offset_s + now_s,
        attributes=attributes,
        error=error,
        link=trace.link,
    )
    waits = [_wait_span(trace, wait, offset_s) for wait in trace.waits]
    if trace.fetch is not None:
        waits.append(_wait_span(trace, trace.fetch, offset_s, "fetch images"))
    attempts = [
        _attempt_span(trace, number, attempt, now_s, offset_s)
        for number, attempt in enumerate(trace.attempts, 1)
    ]
    return [arrival, *waits, *attempts]


def _wait_span(
    trace: RequestTrace, wait: CapacityWait, offset_s: float, name: str = "wait for capacity"
) -> Span:
    return Span(
        context=TraceContext(trace.context.trace_id, wait.span_id),
        parent_id=trace.context.span_id,
        name=name,
        kind=SpanKind.INTERNAL,
        began_s=offset_s + wait.began_s,
        ended_s=offset_s + wait.ended_s,
        attributes={},
    )


def _attempt_span(
    trace: RequestTrace, number: int, attempt: AttemptTrace, now_s: float, offset_s: float
) -> Span:
    return Span(
        context=TraceContext(trace.context.trace_id, attempt.span_id),
        parent_id=trace.context.span_id,
        name="attempt",
        kind=SpanKind.CLIENT,
        began_s=offset_s + attempt.sent_at_s,
        ended_s=offset_s + (attempt.ended_at_s or now_s),
        attributes=_attempt_attributes(attempt, number),
        error=attempt.error,
    )


def _request_attributes(
    context: RequestContext, trace: RequestTrace, pop: PopId
) -> dict[str, AttributeValue]:
    request, usage, route = context.request, context.usage(), context.route
    model: str = request.deployment.name
    if request.adapter is not None:
        model += f":{request.adapter.name}"
    attributes: dict[str, AttributeValue] = {
        names.OPERATION: OPERATIONS.get(request.path) or request.path.rpartition("/")[2],
        names.PROVIDER: names.ISOCHRONE,
        names.MODEL: model,
        names.STREAM: request.is_stream,
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.CACHED_TOKENS: usage.cached_tokens,
        names.OUTPUT_TOKENS: usage.output_tokens,
        names.REQUEST_ID: request.request_id,
        names.TENANT: request.key.tenant_id,
        names.DEPLOYMENT: request.deployment_id,
        names.OUTCOME: context.outcome.value,
        names.ATTEMPTS: len(trace.attempts),
        names.QUEUE_WAIT_S: sum(wait.ended_s - wait.began_s for wait in trace.waits),
        names.ROUTER_POP: pop,
    }
    if request.answer_count > 1:
        attributes[names.CHOICES] = request.answer_count
    if context.times.first_token_at_s is not None:
        attributes[names.FIRST_CHUNK_S] = context.times.first_token_at_s - request.arrived_s
    if route is not None and context.attempt is not None:
        attributes[names.POP], attributes[names.NODE] = route.pop, route.node_id
        attributes[names.REPLICA] = route.replica_id
        attributes[names.WHY] = context.attempt.ranked.reason_header
    return attributes


def _attempt_attributes(attempt: AttemptTrace, number: int) -> dict[str, AttributeValue]:
    target = attempt.target
    route, answered_by = target.route, attempt.answered_by.route.replica_id
    attributes: dict[str, AttributeValue] = {
        names.ATTEMPT: number,
        names.POP: route.pop,
        names.NODE: route.node_id,
        names.REPLICA: route.replica_id,
        names.WHY: target.reason_header,
        names.PREDICTED_FIRST_CHUNK_S: target.ttft_ms / 1000,
    }
    if answered_by != route.replica_id:
        attributes[names.HANDED_OFF_TO] = answered_by
    if attempt.prefill_id:
        attributes[names.PREFILL_REPLICA] = attempt.prefill_id
    if attempt.generated_before:
        attributes[names.RESUMED_TOKENS] = attempt.generated_before
    if attempt.first_token_at_s:
        attributes[names.FIRST_CHUNK_S] = attempt.first_token_at_s - attempt.sent_at_s
    return attributes
