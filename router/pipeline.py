"""The corridor of a request: admit -> pick -> forward -> stream -> record.

Rule 1: nothing here waits for a database or a scheduler.
Rule 2: what a request holds (its seat in the limits, tokens in flight, a connection) is given back
in one place, alike on finish, failure and a client's leaving.
Rule 3: until the first token another replica may be tried; after it another goes on from what was
said, and only where none can is the client told in words.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NodeId
from isochrone.wire.usage import Outcome
from router.admission_queue import LOOK_AGAIN_S, AdmissionQueue, AdmissionRefused, QueueEntry
from router.config import RouterConfig
from router.dataplane.exchange import AttemptFailed, FailureCause, NodeExchange
from router.dataplane.http_messages import HttpResponse, ResponseWriter
from router.dataplane.inline_task import pause
from router.dataplane.response_checks import hold_to_error, hold_to_status, read_answer
from router.dataplane.upstream import Upstream
from router.decide.board import Ranked
from router.decide.drain import come_back_s
from router.decide.limits import Entry, Gate, Limited
from router.decide.pick import Ask, Routes, rank
from router.decide.retries import RetryBudget
from router.decide.tokens_in_flight import Reservation
from router.fleet import Fleet
from router.inference_request import InferenceRequest
from router.metrics import Metrics
from router.proxy_headers import STREAM_LINES, to_client, to_node
from router.record import Recorder
from router.request_context import COMPLETE, REFUSED, RequestContext

NO_REPLICA_RETRY_AFTER_S: Final = 10.0
REFUSALS_MAX: Final = 8
RETRY_PAUSE_S: Final = 0.05
CONTINUED: Final = b": continued on another replica, not token for token\n\n"


class RequestPipeline:
    """Everything a request meets between its decoding and its end."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: Fleet,
        gate: Gate,
        upstream: Upstream,
        recorder: Recorder,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Take what the house shares. `clock` gives monotonic seconds."""
        self._config = config
        self._fleet = fleet
        self._gate = gate
        self._upstream = upstream
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._budget = RetryBudget(config.retry_ratio)
        self.queue = AdmissionQueue(config.queue_depth_max, config.queue_bytes_max, clock)
        fleet.on_room(self.queue.wake)

    async def serve(self, asked: InferenceRequest, client: ResponseWriter) -> None:
        """Answer one request, or raise ApiError where nothing was sent yet."""
        estimate = self._fleet.tokens_of(asked.deployment_id, asked.text_bytes)
        context = RequestContext(asked, estimate)
        now_s = self._clock()
        entry = self._admit(context, now_s)
        allowance = entry.lines(now_s)
        try:
            answer = await self._pick_and_forward(context)
            if answer.is_stream:
                await self._stream(context, client, allowance)
            else:
                self._reply(context, answer, client, allowance)
        except ApiError as error:
            if error.code in (ErrorCode.OUT_OF_CAPACITY, ErrorCode.UNAVAILABLE):
                context.outcome = REFUSED
            raise
        except asyncio.CancelledError:
            context.outcome = Outcome.CANCELLED
            raise
        finally:
            context.leave()
            if context.place is not None:
                self.queue.left(context.place)
            prompt, cached, output = context.used
            spent = asked.spend((prompt, cached, output))
            now_s = self._clock()
            entry.leave(prompt + output, now_s, spent)
            self._recorder.record(context, now_s)

    def _admit(self, context: RequestContext, now_s: float) -> Entry:
        """Hold the request against its key's limits; what it uses is settled on the way out."""
        asked = context.asked
        prompt, output = context.prompt_tokens_estimate, asked.output_tokens_max
        spend = asked.spend((prompt, 0, output))
        try:
            return self._gate.enter(asked.key, prompt + output, now_s, asked.started_at, spend)
        except Limited as error:
            self._metrics.refusals.labels(error.limit).inc()
            raise

    async def _pick_and_forward(self, context: RequestContext) -> NodeExchange:
        """Try replicas in the order of their ranking until one answers."""
        now_s = self._clock()
        self._budget.deposit(now_s)
        failed, refused, served = context.failed, context.refused, context.ranked
        failures, failed_at_s = 0, 0.0
        place = context.take_place(now_s + self._config.queue_timeout_s)
        while True:
            routes = self._rank(context)
            if not (routes or refused or routes.full):
                if context.unfit:
                    raise ApiError(
                        ErrorCode.UPSTREAM, "cannot go on: no other replica resumes a text"
                    )
                if failed:
                    # Everyone failed once: perhaps it was no more than that.
                    failed.clear()
                    await pause(RETRY_PAUSE_S)
                    continue
            must_wait = self.queue.must_wait(place) or len(refused) >= REFUSALS_MAX
            if must_wait or not routes:
                await self._wait_for_room(context, place, is_full=bool(refused))
                refused.clear()
                if self._clock() - failed_at_s > LOOK_AGAIN_S:
                    # Who waits first must not hold up all others for what failed it alone.
                    failed.clear()
                continue
            waited_s = self.queue.began(place)
            if waited_s is not None:
                self._metrics.queue_wait.observe(waited_s)
            ranked = routes[0]
            try:
                exchange = self._ask(context, ranked, routes)
                await exchange.opened
                self._hear(context, ranked, routes, exchange)
                return exchange
            except AttemptFailed as error:
                is_refusal = error.failure in (FailureCause.REFUSED, FailureCause.UNFIT)
                if not is_refusal:
                    self._blame(context)
                context.leave()
                self._unsend(context)
                context.ranked = served
                self._metrics.retries.labels(error.failure.value).inc()
                if is_refusal:
                    self._note_refusal(context, error)
                    continue
                failures, failed_at_s = failures + 1, self._clock()
                is_paid = error.failure is FailureCause.GONE
                if failures >= self._config.attempts_max or not (is_paid or self._may_retry()):
                    raise ApiError(
                        ErrorCode.UPSTREAM,
                        f"cannot answer: {error} (attempt {failures})",
                        retry_after_s=1.0,
                    ) from error

    def _note_refusal(self, context: RequestContext, error: AttemptFailed) -> None:
        """Remember who does not take this request."""
        asked, context.via = context.via, None
        assert asked is not None
        if error.failure is FailureCause.UNFIT:
            context.unfit.add(asked.route.replica_id)
        elif error.refused == headers.QUEUED and context.may_be_turned_away:
            # Its load is known now: it may still be the best, but hardly is.
            context.turned_away += 1
        else:
            context.refused.add(asked.route.replica_id)

    def _blame(self, context: RequestContext) -> None:
        """An attempt broke: leave whom it was sent to alone.

        Where that one passed it on, both are, but neither is ill: which of them broke is not known.
        """
        asked, exchange = context.via, context.exchange
        assert asked is not None and exchange is not None
        self._recorder.attempt_failed(context)
        context.via = None
        context.failed.add(asked.route.replica_id)
        if exchange.head is not None and exchange.head.passed:
            context.failed.add(exchange.head.passed)
        elif cause := self._fleet.failed(asked.route):
            self._metrics.ejections.labels(cause).inc()

    def _rank(self, context: RequestContext) -> Routes:
        asked = context.asked
        prompt_tokens, output_tokens = context.tokens_ahead
        ask = Ask(
            asked.request_id,
            prompt_tokens,
            output_tokens,
            asked.session,
            self._fleet.seat(asked.session),
            self._fleet.held(asked.deployment_id, asked.prefix_keys),
        )
        view = self._fleet.view(asked.deployment_id)
        # The deployment as the table has it now: a step of a rollout counts for those who wait too.
        entry = self._fleet.deployment(asked.deployment.name) or asked.deployment
        drawn = self._fleet.draw(entry, asked.session or asked.request_id)
        routes = rank(view, ask, context.left_alone | drawn.left_alone)
        if not routes and drawn.may_return:
            routes = rank(view, ask, context.left_alone)
        return routes

    def let_go(self, node_id: NodeId, since_s: float) -> None:
        """A node is gone, and silent `since_s`: let who waits for it go elsewhere."""
        self._upstream.let_go(node_id, since_s, self._may_retry)

    def _may_retry(self) -> bool:
        if self._budget.withdraw(self._clock()):
            return True
        self._metrics.retries_denied.inc()
        return False

    async def _wait_for_room(
        self, context: RequestContext, place: QueueEntry, *, is_full: bool
    ) -> None:
        """Wait in the bounded queue, or raise what the client should know instead."""
        name = context.asked.deployment.name
        nobody = not self._fleet.view(place.lane).slots
        if nobody and not context.found_no_replica:
            context.found_no_replica = True
            self._recorder.found_no_replica(context)
        try:
            await self.queue.wait(place)
        except AdmissionRefused as refusal:
            if nobody and not is_full:
                self._metrics.refusals.labels("no_replica").inc()
                raise ApiError(
                    ErrorCode.UNAVAILABLE,
                    f"cannot serve {name} now: no replica is warm yet",
                    retry_after_s=come_back_s(NO_REPLICA_RETRY_AFTER_S, context.asked.request_id),
                ) from None
            self._metrics.refusals.labels(refusal.why.value).inc()
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                str(refusal),
                retry_after_s=come_back_s(
                    self.queue.retry_after_s(place), context.asked.request_id
                ),
            ) from None

    def _ask(self, context: RequestContext, ranked: Ranked, routes: Routes) -> NodeExchange:
        """Send to one replica."""
        asked, route = context.asked, ranked.route
        context.via = ranked
        self._book(context, ranked)
        context.picked_at_s = self._clock()
        patience_s = self._config.first_byte_timeout_s
        if not asked.is_stream:
            patience_s += context.tokens_ahead[1] * self._config.token_timeout_s
        lines = to_node(context, ranked, routes, self._fleet.name, patience_s)
        context.exchange = exchange = self._upstream.ask(
            route.node_id,
            route.address,
            ("POST", asked.path, lines, context.body),
            patience_s,
            self._config.answer_bytes_max,
            context.frames_anew(),
            is_rest=context.said.tokens > 0,
        )
        return exchange

    def _hear(
        self, context: RequestContext, ranked: Ranked, routes: Routes, exchange: NodeExchange
    ) -> None:
        """Take what came: a whole answer or a first token. Raise AttemptFailed where neither."""
        head, reservation = exchange.answer(), context.reservation
        assert reservation is not None
        if head.passed:
            ranked = self._passed_on(context, ranked, routes.of(head.passed))
            reservation = self._book(context, ranked)
        self._fleet.heard(ranked.route, head.load, head.refused, reservation)
        hold_to_status(ranked.route.node_id, head)
        if head.status == 200 and not exchange.is_stream:
            exchange.usage, exchange.body = read_answer(ranked.route.node_id, exchange.body)
        self._fleet.answered(ranked.route)
        now_s = self._clock()
        if exchange.is_stream:
            exchange.wait(self._config.stream_idle_timeout_s)
            context.token_at_s, context.took_ms = now_s, 1000 * (now_s - context.picked_at_s)
            context.said_before = context.said.tokens
            self._fleet.first_token(ranked, context.took_ms, reservation)
            if context.first_token_at_s is None:
                context.first_token_at_s = now_s

    def _book(self, context: RequestContext, ranked: Ranked) -> Reservation:
        """Count a request in where it goes."""
        prompt_tokens, output_tokens = context.tokens_ahead
        # What waits there reads only the uncached part; all of it holds KV.
        context.reservation = reservation = self._fleet.reserve(
            ranked.route, prefill=ranked.uncached_tokens, decode=output_tokens, prompt=prompt_tokens
        )
        context.ranked = ranked
        context.sent = self._fleet.sent(ranked, context.asked.prefix_keys)
        return reservation

    def _passed_on(self, context: RequestContext, asked: Ranked, ranked: Ranked | None) -> Ranked:
        """A sibling answers for whom was asked: give back what was booked there."""
        if ranked is None:
            raise AttemptFailed(
                FailureCause.BROKEN, f"{asked.route.node_id} passed on to a stranger"
            )
        context.unbook()
        self._unsend(context)
        return ranked

    def _unsend(self, context: RequestContext) -> None:
        """It was not read where it is booked: nothing of it is taken to be cached there."""
        if context.route is not None:
            self._fleet.unsent(context.route, context.sent, context.asked.prefix_keys)

    def _reply(
        self,
        context: RequestContext,
        exchange: NodeExchange,
        client: ResponseWriter,
        allowance: str,
    ) -> None:
        """Pass a whole answer on."""
        ranked, head = context.ranked, exchange.head
        assert ranked is not None and head is not None
        lines = to_client(context, ranked, allowance)
        if head.status == 200:
            context.note(exchange.usage)
            context.outcome = COMPLETE
        else:
            context.is_declined, context.outcome = True, REFUSED
            self._unsend(context)
            hold_to_error(exchange.body, head.status)
            retry_after = head.fields.get(b"retry-after")
            if retry_after:
                lines += f"retry-after: {retry_after.decode('latin-1')}\r\n"
        client.reply(HttpResponse(head.status, exchange.body, lines))
        self._learn(context)

    async def _stream(
        self, context: RequestContext, client: ResponseWriter, allowance: str
    ) -> None:
        """Let a stream flow to the client; where its replica dies, another goes on with it."""
        asked, frames, ranked = context.asked, context.frames, context.ranked
        assert frames is not None and ranked is not None
        self._metrics.open_streams.inc()
        try:
            lines = to_client(context, ranked, allowance) + STREAM_LINES
            client.begin(200, "text/event-stream; charset=utf-8", lines)
            await self._flow(context, client)
            context.outcome = COMPLETE
        except AttemptFailed as failure:
            told = ApiError(ErrorCode.UPSTREAM, f"cannot go on with this answer: {failure}")
            client.send(asked.error_event(told))
        except ApiError as error:
            client.send(asked.error_event(error))
        finally:
            self._metrics.open_streams.dec()
            client.reads_from(None)
            context.note(frames.usage)
            if frames.usage is None:
                context.said = frames.said()
        client.end()
        await client.drained()
        self._learn(context)

    async def _flow(self, context: RequestContext, client: ResponseWriter) -> None:
        """Pass frames until `[DONE]`; raise what the client should know instead."""
        frames = context.frames
        assert frames is not None
        while True:
            exchange = context.exchange
            assert exchange is not None
            client.reads_from(exchange)
            try:
                await exchange.flow(client)
                if frames.is_done:
                    # The client has everything; what is left is the end of the body.
                    exchange.let_end()
                    context.exchange = None
                    return
                raise AttemptFailed(FailureCause.ERROR, frames.reason or "an engine's error")
            except AttemptFailed as failure:
                client.reads_from(None)
                self._blame(context)
                if not self._prepare_to_go_on(context, client):
                    raise failure
            if frames.is_done:
                return
            context.leave()
            exchange = await self._pick_and_forward(context)
            self._metrics.continuations.labels("continued").inc()
            if not context.is_exact(exchange.head):
                client.send(CONTINUED)

    def _prepare_to_go_on(self, context: RequestContext, client: ResponseWriter) -> bool:
        """Turn the request into one for the rest of its answer; False where that cannot be."""
        asked, frames = context.asked, context.frames
        assert frames is not None
        context.said = said = frames.said()
        if said.finish_reason is not None and asked.answers == 1:
            # Everything was said but for the end: no replica is needed for that.
            client.send(context.end_of_stream(said))
            frames.is_done = True
            return True
        if context.ask_for_rest():
            return True
        self._metrics.continuations.labels("impossible").inc()
        return False

    def _learn(self, context: RequestContext) -> None:
        """Remember what the answer told: tokens per byte, and where the session sits."""
        asked, route = context.asked, context.route
        assert route is not None
        if context.prompt_tokens is not None:
            self._fleet.learned_tokens(asked.deployment_id, asked.text_bytes, context.prompt_tokens)
            self._fleet.learned_cached(
                route,
                context.sent,
                context.prompt_tokens,
                context.cached_tokens or 0,
                asked.prefix_keys,
            )
        if asked.session and context.outcome is COMPLETE:
            prompt, _, output = context.used
            now_s = self._clock()
            self._fleet.sessions.sat(asked.session, route.replica_id, prompt + output, now_s)
