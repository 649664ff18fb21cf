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
from isochrone.wire.usage import RequestOutcome
from router.asked import Asked
from router.config import RouterConfig
from router.dataplane.errand import pause
from router.dataplane.exchange import AttemptFailed, Exchange, Failure
from router.dataplane.message import Client, Reply
from router.dataplane.upstream import Upstream
from router.dataplane.verdict import hold_to_error, hold_to_status, read_answer
from router.decide.board import Ranked
from router.decide.drain import come_back_s
from router.decide.limits import Entry, Gate, Limited
from router.decide.pick import Ask, Routes, rank
from router.decide.retries import RetryBudget
from router.decide.tokens_in_flight import Reservation
from router.fleet import Fleet
from router.journey import COMPLETE, REFUSED, Journey
from router.metrics import Metrics
from router.record import Recorder
from router.told import STREAM_LINES, to_client, to_node
from router.waiting import LOOK_AGAIN_S, NoRoom, Place, Waiting

NO_REPLICA_RETRY_AFTER_S: Final = 10.0
REFUSALS_MAX: Final = 8
RETRY_PAUSE_S: Final = 0.05
CONTINUED: Final = b": continued on another replica, not token for token\n\n"


class Corridor:
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
        self.waiting = Waiting(config.queue_depth_max, config.queue_bytes_max, clock)
        fleet.on_room(self.waiting.wake)

    async def serve(self, asked: Asked, client: Client) -> None:
        """Answer one request, or raise ApiError where nothing was sent yet."""
        estimate = self._fleet.tokens_of(asked.deployment_id, asked.text_bytes)
        journey = Journey(asked, estimate)
        now_s = self._clock()
        entry = self._admit(journey, now_s)
        allowance = entry.lines(now_s)
        try:
            answer = await self._pick_and_forward(journey)
            if answer.is_stream:
                await self._stream(journey, client, allowance)
            else:
                self._reply(journey, answer, client, allowance)
        except ApiError as error:
            if error.code in (ErrorCode.OUT_OF_CAPACITY, ErrorCode.UNAVAILABLE):
                journey.outcome = REFUSED
            raise
        except asyncio.CancelledError:
            journey.outcome = RequestOutcome.CANCELLED
            raise
        finally:
            journey.leave()
            if journey.place is not None:
                self.waiting.left(journey.place)
            prompt, cached, output = journey.used
            spent = asked.spend((prompt, cached, output))
            now_s = self._clock()
            entry.leave(prompt + output, now_s, spent)
            self._recorder.record(journey, now_s)

    def _admit(self, journey: Journey, now_s: float) -> Entry:
        """Hold the request against its key's limits; what it uses is settled on the way out."""
        asked = journey.asked
        prompt, output = journey.prompt_tokens_estimate, asked.output_tokens_max
        spend = asked.spend((prompt, 0, output))
        try:
            return self._gate.enter(asked.key, prompt + output, now_s, asked.started_at, spend)
        except Limited as error:
            self._metrics.refusals.labels(error.limit).inc()
            raise

    async def _pick_and_forward(self, journey: Journey) -> Exchange:
        """Try replicas in the order of their ranking until one answers."""
        now_s = self._clock()
        self._budget.deposit(now_s)
        failed, refused, served = journey.failed, journey.refused, journey.ranked
        failures, failed_at_s = 0, 0.0
        place = journey.take_place(now_s + self._config.queue_timeout_s)
        while True:
            routes = self._rank(journey)
            if not (routes or refused or routes.full):
                if journey.unfit:
                    raise ApiError(
                        ErrorCode.UPSTREAM, "cannot go on: no other replica resumes a text"
                    )
                if failed:
                    # Everyone failed once: perhaps it was no more than that.
                    failed.clear()
                    await pause(RETRY_PAUSE_S)
                    continue
            must_wait = self.waiting.must_wait(place) or len(refused) >= REFUSALS_MAX
            if must_wait or not routes:
                await self._wait_for_room(journey, place, is_full=bool(refused))
                refused.clear()
                if self._clock() - failed_at_s > LOOK_AGAIN_S:
                    # Who waits first must not hold up all others for what failed it alone.
                    failed.clear()
                continue
            waited_s = self.waiting.began(place)
            if waited_s is not None:
                self._metrics.queue_wait.observe(waited_s)
            ranked = routes[0]
            try:
                exchange = self._ask(journey, ranked, routes)
                await exchange.opened
                self._hear(journey, ranked, routes, exchange)
                return exchange
            except AttemptFailed as error:
                is_refusal = error.failure in (Failure.REFUSED, Failure.UNFIT)
                if not is_refusal:
                    self._blame(journey)
                journey.leave()
                self._unsend(journey)
                journey.ranked = served
                self._metrics.retries.labels(error.failure.value).inc()
                if is_refusal:
                    self._note_refusal(journey, error)
                    continue
                failures, failed_at_s = failures + 1, self._clock()
                is_paid = error.failure is Failure.GONE
                if failures >= self._config.attempts_max or not (is_paid or self._may_retry()):
                    raise ApiError(
                        ErrorCode.UPSTREAM,
                        f"cannot answer: {error} (attempt {failures})",
                        retry_after_s=1.0,
                    ) from error

    def _note_refusal(self, journey: Journey, error: AttemptFailed) -> None:
        """Remember who does not take this request."""
        asked, journey.via = journey.via, None
        assert asked is not None
        if error.failure is Failure.UNFIT:
            journey.unfit.add(asked.route.replica_id)
        elif error.refused == headers.QUEUED and journey.may_be_turned_away:
            # Its load is known now: it may still be the best, but hardly is.
            journey.turned_away += 1
        else:
            journey.refused.add(asked.route.replica_id)

    def _blame(self, journey: Journey) -> None:
        """An attempt broke: leave whom it was sent to alone.

        Where that one passed it on, both are, but neither is ill: which of them broke is not known.
        """
        asked, exchange = journey.via, journey.exchange
        assert asked is not None and exchange is not None
        self._recorder.attempt_failed(journey)
        journey.via = None
        journey.failed.add(asked.route.replica_id)
        if exchange.head is not None and exchange.head.passed:
            journey.failed.add(exchange.head.passed)
        elif cause := self._fleet.failed(asked.route):
            self._metrics.ejections.labels(cause).inc()

    def _rank(self, journey: Journey) -> Routes:
        asked = journey.asked
        prompt_tokens, output_tokens = journey.tokens_ahead
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
        routes = rank(view, ask, journey.left_alone | drawn.left_alone)
        if not routes and drawn.may_return:
            routes = rank(view, ask, journey.left_alone)
        return routes

    def let_go(self, node_id: NodeId, since_s: float) -> None:
        """A node is gone, and silent `since_s`: let who waits for it go elsewhere."""
        self._upstream.let_go(node_id, since_s, self._may_retry)

    def _may_retry(self) -> bool:
        if self._budget.withdraw(self._clock()):
            return True
        self._metrics.retries_denied.inc()
        return False

    async def _wait_for_room(self, journey: Journey, place: Place, *, is_full: bool) -> None:
        """Wait in the bounded queue, or raise what the client should know instead."""
        name = journey.asked.deployment.name
        nobody = not self._fleet.view(place.lane).slots
        if nobody and not journey.found_no_replica:
            journey.found_no_replica = True
            self._recorder.found_no_replica(journey)
        try:
            await self.waiting.wait(place)
        except NoRoom as refusal:
            if nobody and not is_full:
                self._metrics.refusals.labels("no_replica").inc()
                raise ApiError(
                    ErrorCode.UNAVAILABLE,
                    f"cannot serve {name} now: no replica is warm yet",
                    retry_after_s=come_back_s(NO_REPLICA_RETRY_AFTER_S, journey.asked.request_id),
                ) from None
            self._metrics.refusals.labels(refusal.why.value).inc()
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                str(refusal),
                retry_after_s=come_back_s(
                    self.waiting.retry_after_s(place), journey.asked.request_id
                ),
            ) from None

    def _ask(self, journey: Journey, ranked: Ranked, routes: Routes) -> Exchange:
        """Send to one replica."""
        asked, route = journey.asked, ranked.route
        journey.via = ranked
        self._book(journey, ranked)
        journey.picked_at_s = self._clock()
        patience_s = self._config.first_byte_timeout_s
        if not asked.is_stream:
            patience_s += journey.tokens_ahead[1] * self._config.token_timeout_s
        lines = to_node(journey, ranked, routes, self._fleet.name, patience_s)
        journey.exchange = exchange = self._upstream.ask(
            route.node_id,
            route.address,
            ("POST", asked.path, lines, journey.body),
            patience_s,
            self._config.answer_bytes_max,
            journey.frames_anew(),
            is_rest=journey.said.tokens > 0,
        )
        return exchange

    def _hear(self, journey: Journey, ranked: Ranked, routes: Routes, exchange: Exchange) -> None:
        """Take what came: a whole answer or a first token. Raise AttemptFailed where neither."""
        head, reservation = exchange.answer(), journey.reservation
        assert reservation is not None
        if head.passed:
            ranked = self._passed_on(journey, ranked, routes.of(head.passed))
            reservation = self._book(journey, ranked)
        self._fleet.heard(ranked.route, head.load, head.refused, reservation)
        hold_to_status(ranked.route.node_id, head)
        if head.status == 200 and not exchange.is_stream:
            exchange.usage, exchange.body = read_answer(ranked.route.node_id, exchange.body)
        self._fleet.answered(ranked.route)
        now_s = self._clock()
        if exchange.is_stream:
            exchange.wait(self._config.stream_idle_timeout_s)
            journey.token_at_s, journey.took_ms = now_s, 1000 * (now_s - journey.picked_at_s)
            journey.said_before = journey.said.tokens
            self._fleet.first_token(ranked, journey.took_ms, reservation)
            if journey.first_token_at_s is None:
                journey.first_token_at_s = now_s

    def _book(self, journey: Journey, ranked: Ranked) -> Reservation:
        """Count a request in where it goes."""
        prompt_tokens, output_tokens = journey.tokens_ahead
        # What waits there reads only the uncached part; all of it holds KV.
        journey.reservation = reservation = self._fleet.reserve(
            ranked.route, prefill=ranked.uncached_tokens, decode=output_tokens, prompt=prompt_tokens
        )
        journey.ranked = ranked
        journey.sent = self._fleet.sent(ranked, journey.asked.prefix_keys)
        return reservation

    def _passed_on(self, journey: Journey, asked: Ranked, ranked: Ranked | None) -> Ranked:
        """A sibling answers for whom was asked: give back what was booked there."""
        if ranked is None:
            raise AttemptFailed(Failure.BROKEN, f"{asked.route.node_id} passed on to a stranger")
        journey.unbook()
        self._unsend(journey)
        return ranked

    def _unsend(self, journey: Journey) -> None:
        """It was not read where it is booked: nothing of it is taken to be cached there."""
        if journey.route is not None:
            self._fleet.unsent(journey.route, journey.sent, journey.asked.prefix_keys)

    def _reply(self, journey: Journey, exchange: Exchange, client: Client, allowance: str) -> None:
        """Pass a whole answer on."""
        ranked, head = journey.ranked, exchange.head
        assert ranked is not None and head is not None
        lines = to_client(journey, ranked, allowance)
        if head.status == 200:
            journey.note(exchange.usage)
            journey.outcome = COMPLETE
        else:
            journey.is_declined, journey.outcome = True, REFUSED
            self._unsend(journey)
            hold_to_error(exchange.body, head.status)
            retry_after = head.fields.get(b"retry-after")
            if retry_after:
                lines += f"retry-after: {retry_after.decode('latin-1')}\r\n"
        client.reply(Reply(head.status, exchange.body, lines))
        self._learn(journey)

    async def _stream(self, journey: Journey, client: Client, allowance: str) -> None:
        """Let a stream flow to the client; where its replica dies, another goes on with it."""
        asked, frames, ranked = journey.asked, journey.frames, journey.ranked
        assert frames is not None and ranked is not None
        self._metrics.open_streams.inc()
        try:
            lines = to_client(journey, ranked, allowance) + STREAM_LINES
            client.begin(200, "text/event-stream; charset=utf-8", lines)
            await self._flow(journey, client)
            journey.outcome = COMPLETE
        except AttemptFailed as failure:
            told = ApiError(ErrorCode.UPSTREAM, f"cannot go on with this answer: {failure}")
            client.send(asked.error_event(told))
        except ApiError as error:
            client.send(asked.error_event(error))
        finally:
            self._metrics.open_streams.dec()
            client.reads_from(None)
            journey.note(frames.usage)
            if frames.usage is None:
                journey.said = frames.said()
        client.end()
        await client.drained()
        self._learn(journey)

    async def _flow(self, journey: Journey, client: Client) -> None:
        """Pass frames until `[DONE]`; raise what the client should know instead."""
        frames = journey.frames
        assert frames is not None
        while True:
            exchange = journey.exchange
            assert exchange is not None
            client.reads_from(exchange)
            try:
                await exchange.flow(client)
                if frames.is_done:
                    # The client has everything; what is left is the end of the body.
                    exchange.let_end()
                    journey.exchange = None
                    return
                raise AttemptFailed(Failure.ERROR, frames.reason or "an engine's error")
            except AttemptFailed as failure:
                client.reads_from(None)
                self._blame(journey)
                if not self._prepare_to_go_on(journey, client):
                    raise failure
            if frames.is_done:
                return
            journey.leave()
            exchange = await self._pick_and_forward(journey)
            self._metrics.continuations.labels("continued").inc()
            if not journey.is_exact(exchange.head):
                client.send(CONTINUED)

    def _prepare_to_go_on(self, journey: Journey, client: Client) -> bool:
        """Turn the request into one for the rest of its answer; False where that cannot be."""
        asked, frames = journey.asked, journey.frames
        assert frames is not None
        journey.said = said = frames.said()
        if said.finish_reason is not None and asked.answers == 1:
            # Everything was said but for the end: no replica is needed for that.
            client.send(journey.end_of_stream(said))
            frames.is_done = True
            return True
        if journey.ask_for_rest():
            return True
        self._metrics.continuations.labels("impossible").inc()
        return False

    def _learn(self, journey: Journey) -> None:
        """Remember what the answer told: tokens per byte, and where the session sits."""
        asked, route = journey.asked, journey.route
        assert route is not None
        if journey.prompt_tokens is not None:
            self._fleet.learned_tokens(asked.deployment_id, asked.text_bytes, journey.prompt_tokens)
            self._fleet.learned_cached(
                route,
                journey.sent,
                journey.prompt_tokens,
                journey.cached_tokens or 0,
                asked.prefix_keys,
            )
        if asked.session and journey.outcome is COMPLETE:
            prompt, _, output = journey.used
            now_s = self._clock()
            self._fleet.sessions.sat(asked.session, route.replica_id, prompt + output, now_s)
