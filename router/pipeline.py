"""The main path of a request: admit -> rank -> send -> stream -> record.

Rule 1: no step waits for a database or a scheduler.
Rule 2: the resources of a request (its share of the key's limits, tokens in flight, a connection)
are released in one place, in the same way whether it finishes, fails or its client disconnects.
Rule 3: until the first token another replica may be tried. After it another replica continues the
generated text; only if none can does the client get an error within its stream.
Rule 4: the state of each attempt follows the table in decide/attempt.py.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.routes import KeyEntry
from isochrone.wire.peers.usage import RequestOutcome
from router.admission_queue import LOOK_AGAIN_S, AdmissionQueue, AdmissionRefused, QueueEntry
from router.attempt_runner import AttemptRunner
from router.config import RouterConfig
from router.dataplane.exchange import AttemptFailed, NodeExchange
from router.dataplane.http1 import EVENT_STREAM, format_headers
from router.dataplane.http_messages import HttpResponse, ResponseWriter
from router.dataplane.inline_task import inline_sleep
from router.dataplane.response_checks import client_error_body
from router.dataplane.upstream import Upstream
from router.dataplane.usage import UsageCount
from router.decide.admission.body_limits import AnsweredBodies
from router.decide.admission.limits import AdmittedRequest, KeyLimiter
from router.decide.admission.retry_after import spread_retry_after_s
from router.decide.admission.retry_budget import RetryBudget
from router.decide.attempt import AttemptEvent, FailedAttempts, FailureCause
from router.fetch_images import fetch_images
from router.fleet_state import FleetState
from router.inference_request import JSON, InferenceRequest
from router.poison_guard import PoisonGuard
from router.proxy_headers import STREAM_HEADERS, client_headers, deprecation_headers
from router.recording.metrics import Metrics
from router.recording.record import Recorder
from router.recording.trace_spans import RequestTracer
from router.request_context import (
    NO_REPLICAS,
    OUTCOME_COMPLETE,
    OUTCOME_REFUSED,
    ReplicaAttempt,
    RequestContext,
)

NO_REPLICA_RETRY_AFTER_S: Final = 10.0
REFUSALS_MAX: Final = 8
"""After this many refusals a request waits before it is sent to another replica."""

RETRY_PAUSE_S: Final = 0.05
CANNOT_CONTINUE: Final = "cannot continue this answer after a server error, send the request again"
"""Within a stream there is no status: some clients retry if the message has 'server error'."""

RESUMED_COMMENT: Final = b": continued on another replica, not token for token\n\n"
"""An SSE comment before output that may differ from what the first replica would have sent."""

EVENTS: Final = f"{EVENT_STREAM}; charset=utf-8"
# Looked up once, because access to an enum member runs interpreted code.
COMPLETED: Final = AttemptEvent.COMPLETED


class RequestPipeline:
    """Serves inference requests, from the decoded request to the recorded outcome."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: FleetState,
        limiter: KeyLimiter,
        upstream: Upstream,
        recorder: Recorder,
        metrics: Metrics,
        poison_guard: PoisonGuard,
        clock: Callable[[], float],
        tracer: RequestTracer | None = None,
    ) -> None:
        """Use the parts that the whole router shares. `clock` returns monotonic seconds.

        Without a `tracer` no request is traced.
        """
        self._config = config
        self._fleet = fleet
        self._limiter = limiter
        self._upstream = upstream
        self._recorder = recorder
        self._metrics = metrics
        self._poison_guard = poison_guard
        self._clock = clock
        self._tracer = tracer
        self._attempts = AttemptRunner(
            config=config,
            fleet=fleet,
            upstream=upstream,
            recorder=recorder,
            metrics=metrics,
            clock=clock,
            tracer=tracer,
        )
        self._retry_budget = RetryBudget(config.retry_ratio)
        self._bodies = AnsweredBodies(config.answers_held_bytes_max)
        self.queue = AdmissionQueue(config.queue_depth_max, config.queue_bytes_max, clock)
        fleet.on_capacity(self.queue.wake)
        upstream.on_connection = fleet.note_connection

    async def serve(self, request: InferenceRequest, writer: ResponseWriter) -> None:
        """Answer one request. Raises ApiError if nothing was written yet."""
        estimate = self._fleet.routing(request.deployment_id).estimate_tokens(request.text_bytes)
        context = RequestContext(request, estimate)
        now_s = self._clock()
        admitted = self._admit(context, now_s)
        rate_limit_lines = admitted.header_lines(now_s)
        if request.deployment.deprecation is not None:
            rate_limit_lines += format_headers(deprecation_headers(request.deployment.deprecation))
        if self._tracer is not None:
            context.trace = self._tracer.begin(request)
        try:
            if request.fetch_images is not None:
                await fetch_images(context, self._bodies, self._tracer, self._clock)
                now_s = self._clock()
            context.held_bytes = self._bodies.hold(request.tenant_id, len(request.body))
            self._poison_guard.check(context)
            exchange = await self._send_until_answered(context, now_s)
            if exchange.is_stream:
                await self._stream(context, admitted, writer, rate_limit_lines)
            else:
                self._reply(context, admitted, exchange, writer, rate_limit_lines)
        except ApiError as error:
            if error.code in (ErrorCode.OUT_OF_CAPACITY, ErrorCode.UNAVAILABLE):
                context.outcome = OUTCOME_REFUSED
            if context.trace is not None:
                context.trace.error = error.code.value
            raise
        except asyncio.CancelledError:
            context.outcome = RequestOutcome.CANCELLED
            raise
        finally:
            context.release()
            self._bodies.release(request.tenant_id, context.held_bytes)
            if context.queue_entry is not None:
                self.queue.leave(context.queue_entry)
            self._poison_guard.record_end(context)
            self._record_end(context, admitted)

    def _record_end(self, context: RequestContext, admitted: AdmittedRequest) -> None:
        """Settle the key's limits and record the usage, once.

        An answer is recorded before its last bytes are written: a router that is killed when the
        client has all of it has its usage on disk.
        """
        if context.is_recorded:
            return
        context.is_recorded = True
        usage = context.usage()
        now_s = self._clock()
        drawn = usage.prompt_tokens + usage.output_tokens
        if not drawn and context.is_cancelled_at_replica:
            drawn = context.prompt_tokens_estimate
        admitted.settle(drawn, now_s, context.request.cost(usage))
        self._recorder.record(context, usage, now_s)
        if self._tracer is not None:
            self._tracer.end(context)

    def _admit(self, context: RequestContext, now_s: float) -> AdmittedRequest:
        """Charge the estimate to the key's limits; raise LimitExceeded if they are reached."""
        request = context.request
        prompt, output = context.prompt_tokens_estimate, request.output_tokens_max
        cost = request.cost(UsageCount(prompt, output, 0))
        budget = self._fleet.directory.budget_of(request.key)
        return self._limiter.admit(
            request.key, prompt + output, now_s, request.started_at, cost, budget
        )

    def check_limits(self, key: KeyEntry, unix_s: float) -> None:
        """Raise LimitExceeded if no request of the key would be admitted now."""
        budget = self._fleet.directory.budget_of(key)
        self._limiter.check(key, self._clock(), unix_s, budget)

    async def _send_until_answered(self, context: RequestContext, now_s: float) -> NodeExchange:
        """Try replicas in the order of their ranking until one answers; return its exchange.

        While none has capacity the request waits in the admission queue. Raises ApiError if it
        waited too long or the attempts failed.
        """
        self._retry_budget.deposit(now_s)
        excluded, failed = context.excluded, FailedAttempts()
        entry = context.new_queue_entry(now_s + self._config.queue_timeout_s)
        while True:
            routes = self._attempts.rank(context)
            must_look_again = excluded.refused or excluded.full or routes.full_count
            if not (routes or must_look_again):
                if excluded.cannot_resume:
                    raise ApiError(
                        ErrorCode.UPSTREAM,
                        f"{CANNOT_CONTINUE}: no other replica can resume it",
                    )
                if excluded.handed_off:
                    # Their nodes have not failed: only the word of another has it so.
                    excluded.handed_off = NO_REPLICAS
                    continue
                if excluded.failed:
                    # Every replica has failed once; it may have been momentary.
                    excluded.forget_failures()
                    await inline_sleep(RETRY_PAUSE_S)
                    continue
            must_wait = self.queue.must_wait(entry) or len(excluded.refused) >= REFUSALS_MAX
            if must_wait or not routes:
                await self._wait_for_capacity(context, entry, is_full=bool(excluded.refused))
                excluded.refused = NO_REPLICAS
                if self._clock() - failed.last_at_s > LOOK_AGAIN_S:
                    # The head of the queue must not block others because of its own failures.
                    excluded.forget_failures()
                continue
            waited_s = self.queue.admit(entry)
            if waited_s is not None:
                self._metrics.queue_wait.observe(waited_s)
            previous = context.attempt
            attempt, exchange = self._attempts.send(context, routes)
            try:
                await exchange.opened
                self._attempts.take_answer(context, attempt, exchange, routes)
                return exchange
            except AttemptFailed as error:
                context.attempt = previous
                self._end_attempt(context, attempt, error, failed)

    def _end_attempt(
        self,
        context: RequestContext,
        attempt: ReplicaAttempt,
        error: AttemptFailed,
        failed: FailedAttempts,
    ) -> None:
        """End an attempt without an answer; raise ApiError if no other one may follow."""
        is_refusal = self._attempts.end(context, attempt, error)
        if self._tracer is not None:
            self._tracer.end_attempt(context, attempt, error.cause.value)
        self._metrics.retries.labels(error.cause.value).inc()
        if is_refusal:
            return
        if error.cause is FailureCause.ENGINE_LOST:
            self._poison_guard.record_loss(context, attempt)
        failed.record(error.cause, self._clock())
        # `fail_node` has taken the retries of requests that it failed.
        is_paid = error.cause is FailureCause.GONE
        if failed.count >= self._config.attempts_max or not (is_paid or self._may_retry()):
            raise failed.as_error(error) from error

    async def _wait_for_capacity(
        self, context: RequestContext, entry: QueueEntry, *, is_full: bool
    ) -> None:
        """Wait in the admission queue; raise ApiError if the request must not wait any longer.

        `is_full` means that replicas exist but refused the request.
        """
        request = context.request
        has_no_replica = not self._fleet.has_replica(request.deployment_id, request.regions)
        if has_no_replica and not context.found_no_replica:
            context.found_no_replica = True
            self._recorder.found_no_replica(context)
        waiting_since_s = self._clock()
        entry.was_refused = is_full or bool(
            self._fleet.full_for(context.request_group, waiting_since_s)
        )
        try:
            await self.queue.wait(entry)
        except AdmissionRefused as refused:
            if has_no_replica and not is_full:
                self._metrics.refusals.labels("no_replica").inc()
                why = self._fleet.why_no_replica(request.deployment_id, request.regions)
                raise ApiError(
                    ErrorCode.UNAVAILABLE,
                    f"cannot serve {request.deployment.name} now: {why}",
                    retry_after_s=spread_retry_after_s(
                        NO_REPLICA_RETRY_AFTER_S, request.request_id
                    ),
                ) from None
            self._metrics.refusals.labels(refused.reason.value).inc()
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                str(refused),
                retry_after_s=spread_retry_after_s(
                    self.queue.retry_after_s(entry), request.request_id
                ),
            ) from None
        finally:
            if self._tracer is not None:
                self._tracer.add_wait(context, waiting_since_s)

    def fail_node(self, node_id: NodeId, since_s: float) -> None:
        """Let the requests that wait for a lost node, silent since `since_s`, go elsewhere."""
        self._upstream.fail_exchanges(node_id, since_s, self._may_retry)

    def _may_retry(self) -> bool:
        """Take one retry from the budget; return False if it is spent."""
        if self._retry_budget.withdraw(self._clock()):
            return True
        self._metrics.retries_denied.inc()
        return False

    def _reply(
        self,
        context: RequestContext,
        admitted: AdmittedRequest,
        exchange: NodeExchange,
        writer: ResponseWriter,
        rate_limit_lines: str,
    ) -> None:
        """Write a complete response to the client."""
        attempt, head = context.attempt, exchange.head
        assert attempt is not None and head is not None
        attempt.take(COMPLETED)
        header_lines = client_headers(context, attempt.ranked, rate_limit_lines)
        if head.status == 200:
            if exchange.usage is not None:
                context.engine_usage = exchange.usage
            context.outcome = OUTCOME_COMPLETE
        else:
            context.is_declined, context.outcome = True, OUTCOME_REFUSED
            self._attempts.forget_prefix(context, attempt)
            exchange.body = client_error_body(exchange.body, head.status)
            retry_after = head.fields.get(b"retry-after")
            if retry_after:
                header_lines += f"retry-after: {retry_after.decode('latin-1')}\r\n"
        # FastAPI's status for invalid fields; the OpenAI surface has 400 for them.
        status = 400 if head.status == 422 else head.status
        is_media = context.request.is_media and head.status == 200
        content_type = head.content_type if is_media else JSON
        self._record_end(context, admitted)
        writer.reply(HttpResponse(status, exchange.body, header_lines, content_type))
        self._attempts.learn(context, attempt)

    async def _stream(
        self,
        context: RequestContext,
        admitted: AdmittedRequest,
        writer: ResponseWriter,
        rate_limit_lines: str,
    ) -> None:
        """Write a stream to the client; other replicas continue it if its replica fails."""
        request, stream, attempt = context.request, context.stream, context.attempt
        relay = stream.relay
        assert relay is not None and attempt is not None
        self._metrics.open_streams.inc()
        content_type = EVENTS
        if request.is_media and attempt.exchange is not None and attempt.exchange.head:
            content_type = attempt.exchange.head.content_type
        try:
            header_lines = client_headers(context, attempt.ranked, rate_limit_lines)
            writer.begin(200, content_type, header_lines + STREAM_HEADERS)
            stream.has_begun = True
            await self._relay_until_done(context, writer)
            context.outcome = OUTCOME_COMPLETE
        except AttemptFailed as failure:
            error_event = ApiError(ErrorCode.UPSTREAM, f"{CANNOT_CONTINUE}: {failure}")
            if not content_type.startswith(EVENT_STREAM):
                # An event would be heard as noise, so the response breaks off instead.
                raise error_event from failure
            writer.send(request.encode_error_event(error_event))
        except ApiError as error:
            writer.send(request.encode_error_event(error))
        finally:
            self._metrics.open_streams.dec()
            writer.set_source(None)
            if relay.usage is not None:
                context.engine_usage = relay.usage
            else:
                stream.generated = relay.generated()
        self._record_end(context, admitted)
        if stream.ending:
            writer.send(stream.ending)
        writer.end()
        await writer.drained()
        last_attempt = context.attempt
        assert last_attempt is not None
        self._attempts.learn(context, last_attempt)

    async def _relay_until_done(self, context: RequestContext, writer: ResponseWriter) -> None:
        """Relay frames until `[DONE]`, from one replica after the other.

        Raises AttemptFailed if a replica failed and no other can continue, ApiError if none did.
        """
        relay = context.stream.relay
        assert relay is not None
        while True:
            attempt = context.attempt
            assert attempt is not None and attempt.exchange is not None
            exchange = attempt.exchange
            writer.set_source(exchange)
            try:
                await exchange.relay_to(writer)
                if relay.declined_body:
                    # No other replica would do better, and this one is not at fault.
                    attempt.take(COMPLETED)
                    context.is_declined, context.outcome = True, OUTCOME_REFUSED
                    raise ApiError(ErrorCode.INVALID_REQUEST, relay.error_message)
                if relay.is_done:
                    attempt.take(COMPLETED)
                    # The answer is complete; only the end of the body is still to come.
                    context.stream.ending = exchange.ending
                    exchange.drain()
                    attempt.exchange = None
                    return
                raise AttemptFailed(
                    FailureCause.ENGINE_LOST if relay.is_engine_lost else FailureCause.ERROR,
                    relay.error_message or "the engine reported an error",
                )
            except AttemptFailed as failure:
                writer.set_source(None)
                self._attempts.record_failure(context, attempt, failure.cause)
                if self._tracer is not None:
                    self._tracer.end_attempt(context, attempt, failure.cause.value)
                if failure.cause is FailureCause.ENGINE_LOST:
                    self._poison_guard.record_loss(context, attempt)
                if not self._prepare_resumption(context):
                    raise failure
            if relay.is_done:
                attempt.take(AttemptEvent.RESUMED)
                return
            attempt.release()
            exchange = await self._send_until_answered(context, self._clock())
            attempt.take(AttemptEvent.RESUMED)
            if not exchange.is_stream:
                reason = "the next replica refused it"
                raise ApiError(ErrorCode.UPSTREAM, f"{CANNOT_CONTINUE}: {reason}")
            self._metrics.continuations.labels("continued").inc()
            if not context.is_exact_resumption(exchange.head):
                writer.send(RESUMED_COMMENT)

    def _prepare_resumption(self, context: RequestContext) -> bool:
        """Make the next attempt ask for the rest of the answer; return False if it cannot.

        If only the end of the stream is missing, no replica is needed: it is made here.
        """
        stream = context.stream
        relay = stream.relay
        assert relay is not None
        stream.generated = relay.generated()
        if context.lacks_only_end():
            stream.ending = context.missing_end()
            relay.is_done = True
            return True
        if context.prepare_resumption():
            return True
        self._metrics.continuations.labels("impossible").inc()
        return False
