"""The corridor of a request: admit -> pick -> forward -> stream -> record.

Rule 1: nothing here waits for a database or a scheduler.
Rule 2: what a request holds (its seat in the limits, tokens in flight, a connection) is on one
exit stack, so that finish, failure and a client's leaving give it back alike.
Rule 3: until the first token another replica may be tried; after it the client is told in words.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import ReplicaId
from isochrone.wire.usage import Outcome
from router.config import RouterConfig
from router.dataplane import sse
from router.dataplane.forward import Answer, AttemptFailed, Failure, Upstream
from router.decide.admit import Gate
from router.decide.board import Ranked
from router.decide.health import RetryBudget
from router.decide.pick import Ask, Ranking, rank
from router.fleet import Fleet
from router.metrics import Metrics
from router.record import Asked, Journey, Recorder
from router.waiting import QueueFull, Waiting

CAPACITY_RETRY_AFTER_S: Final = 2.0
NO_REPLICA_RETRY_AFTER_S: Final = 10.0
REFUSALS_MAX: Final = 8
QUEUED: Final = "queued"
"""A node's word for a longer queue than this router chose by."""

TURNED_AWAY_MAX: Final = 12
RETRY_PAUSE_S: Final = 0.05
HEAD_BYTES_MAX: Final = 256 * 1024
END_TIMEOUT_S: Final = 0.5

Batch = list[tuple[bytes, sse.Kind]]


class ClientGone(ConnectionError):
    """The client left or does not read."""


class Client(Protocol):
    """The caller's end, whichever public surface it came by."""

    async def begin(self, status: int, content_type: str, extra: dict[str, str]) -> None:
        """Send the answer's head."""

    async def send(self, data: bytes) -> None:
        """Send bytes, waiting while the client reads slower; ClientGone where it does not."""

    async def end(self) -> None:
        """End the answer well."""

    def error_event(self, error: ApiError) -> bytes:
        """Write an error as an event within a stream."""


class Opened(NamedTuple):
    """An answer that goes to the client: begun (`first`), whole (`body`), or a refusal of it."""

    ranked: Ranked
    answer: Answer
    first: Batch
    rest: AsyncGenerator[Batch, None] | None
    body: bytes
    decoded: dict[str, Any]


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
        self.waiting = Waiting(config.queue_depth_max)
        fleet.on_room(self.waiting.wake)

    async def serve(self, asked: Asked, client: Client) -> None:
        """Answer one request, or raise ApiError where nothing was sent yet."""
        estimate = self._fleet.tokens_of(asked.deployment.deployment_id, asked.text_bytes)
        journey = Journey(asked, estimate)
        async with AsyncExitStack() as held:
            allowance = self._admit(journey, held)
            held.callback(self._recorder.record, journey)
            try:
                opened = await self._pick_and_forward(journey, held)
                await self._stream(journey, opened, client, allowance)
            except ApiError as error:
                if error.code in (ErrorCode.OUT_OF_CAPACITY, ErrorCode.UNAVAILABLE):
                    journey.outcome = Outcome.REFUSED
                raise
            except (asyncio.CancelledError, ClientGone):
                journey.outcome = Outcome.CANCELLED
                raise

    def _admit(self, journey: Journey, held: AsyncExitStack) -> dict[str, str]:
        """Hold the request against its key's limits; what it uses is settled on the way out."""
        asked = journey.asked
        estimate = journey.prompt_tokens_estimate + asked.output_tokens_max
        entry = self._gate.enter(asked.key, estimate, self._clock())
        held.callback(lambda: entry.leave(_charged(journey), self._clock()))
        return entry.allowance.headers()

    async def _pick_and_forward(self, journey: Journey, held: AsyncExitStack) -> Opened:
        """Try replicas in the order of their ranking until one answers."""
        self._budget.deposit()
        failed: set[ReplicaId] = set()
        refused: set[ReplicaId] = set()
        failures = 0
        waits_until_s = self._clock() + self._config.queue_timeout_s
        while True:
            ranking, ask = self._rank(journey, frozenset(failed | refused))
            if not ranking.routes and failed and not (refused or ranking.full):
                # Everyone failed once; what failed may have been an old connection.
                failed.clear()
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if not ranking.routes or len(refused) >= REFUSALS_MAX:
                await self._wait_for_room(journey, waits_until_s, is_full=bool(refused))
                refused.clear()
                continue
            ranked = ranking.routes[0]
            try:
                async with AsyncExitStack() as attempt:
                    opened = await self._attempt(journey, ask, ranked, attempt)
                    held.push_async_exit(attempt.pop_all())
                    return opened
            except AttemptFailed as error:
                self._metrics.retries.labels(error.failure.value).inc()
                if error.failure is Failure.REFUSED:
                    self._fleet.unsent(ranked.route, journey.sent, journey.asked.prefix_keys)
                    if error.refused == QUEUED and journey.turned_away < TURNED_AWAY_MAX:
                        # Its load is known now: it may still be the best, but hardly is.
                        journey.turned_away += 1
                        continue
                    refused.add(ranked.route.replica_id)
                    continue
                failed.add(ranked.route.replica_id)
                failures += 1
                if self._fleet.health.failed(ranked.route.replica_id, self._clock()):
                    self._metrics.ejections.inc()
                if failures >= self._config.attempts_max or not self._budget.withdraw():
                    raise ApiError(
                        ErrorCode.UPSTREAM,
                        f"cannot answer: {error} (attempt {failures})",
                        retry_after_s=1.0,
                    ) from error

    def _rank(self, journey: Journey, excluded: frozenset[ReplicaId]) -> tuple[Ranking, Ask]:
        asked = journey.asked
        ask = Ask(
            request_id=asked.request_id,
            prompt_tokens=journey.prompt_tokens_estimate,
            output_tokens=asked.output_tokens_max,
            session=asked.session,
            seat=self._fleet.seat(asked.session),
            held=self._fleet.held(asked.deployment.deployment_id, asked.prefix_keys),
        )
        return rank(self._fleet.view(asked.deployment.deployment_id), ask, excluded), ask

    async def _wait_for_room(self, journey: Journey, until_s: float, *, is_full: bool) -> None:
        """Wait in the bounded queue, or raise what the client should know instead."""
        asked = journey.asked
        deployment_id = asked.deployment.deployment_id
        nobody = not self._fleet.view(deployment_id).slots
        journey.found_no_replica |= nobody
        left_s = until_s - self._clock()
        try:
            if asked.reject_if_busy or left_s <= 0:
                raise QueueFull
            await self.waiting.wait(deployment_id, left_s)
        except QueueFull:
            if nobody and not is_full:
                raise ApiError(
                    ErrorCode.UNAVAILABLE,
                    f"cannot serve {asked.deployment.name} now: no replica is warm yet",
                    retry_after_s=NO_REPLICA_RETRY_AFTER_S,
                ) from None
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "3040: Capacity temporarily exceeded, please try again.",
                retry_after_s=CAPACITY_RETRY_AFTER_S,
            ) from None

    async def _attempt(
        self, journey: Journey, ask: Ask, ranked: Ranked, attempt: AsyncExitStack
    ) -> Opened:
        """Send to one replica and wait for its first token, or raise AttemptFailed."""
        asked = journey.asked
        route = ranked.route
        # What waits there reads only the uncached part; all of it holds KV.
        reservation = self._fleet.reserve(
            route,
            prefill=ranked.uncached_tokens,
            decode=asked.output_tokens_max,
            prompt=ask.prompt_tokens,
        )
        attempt.callback(reservation.release)
        journey.ranked = ranked
        journey.sent = self._fleet.sent(ranked, asked.prefix_keys)
        journey.picked_at_s = self._clock()
        sent = {
            headers.REPLICA: route.replica_id,
            headers.REQUEST_ID: asked.request_id,
            headers.CACHE_SALT: asked.key.tenant_id,
            headers.TOKENS: headers.format_tokens(ask.prompt_tokens, ask.output_tokens),
            headers.UNREAD_TOKENS: str(ranked.uncached_tokens),
            headers.DEADLINE_MS: str(round(self._config.first_byte_timeout_s * 1000)),
        }
        if ranked.queue_tokens_max and journey.turned_away < TURNED_AWAY_MAX:
            sent[headers.QUEUE_TOKENS_MAX] = str(ranked.queue_tokens_max)
        try:
            answer = await attempt.enter_async_context(
                self._upstream.ask(route, asked.path, asked.body, sent)
            )
            self._fleet.heard(route, answer.load, answer.refused)
            _hold_to_status(answer)
            opened = await self._begin(asked, ranked, answer, attempt)
        except AttemptFailed:
            journey.ranked = None
            raise
        self._fleet.health.answered(route.replica_id)
        if opened.rest is not None:
            journey.first_token_at_s = now_s = self._clock()
            self._fleet.first_token(ranked, 1000 * (now_s - journey.picked_at_s), reservation)
        reservation.first_token()
        return opened

    async def _begin(
        self, asked: Asked, ranked: Ranked, answer: Answer, attempt: AsyncExitStack
    ) -> Opened:
        """Read a whole answer, or a stream as far as its first token."""
        if answer.status != 200 or not asked.is_stream:
            body = await answer.whole(self._config.answer_bytes_max)
            return Opened(ranked, answer, [], None, body, _object(answer, body))
        if not answer.content_type.startswith("text/event-stream"):
            raise AttemptFailed(Failure.BROKEN, f"{answer.route.node_id} sent no event stream")
        answer.patience_s = self._config.first_byte_timeout_s
        rest = _batches(answer)
        attempt.push_async_callback(rest.aclose)
        first: Batch = []
        size_bytes = 0
        async for batch in rest:
            first += batch
            size_bytes += sum(len(frame) for frame, _ in batch)
            if any(kind.is_error for _, kind in batch):
                raise AttemptFailed(Failure.ERROR, f"{answer.route.node_id} reported an error")
            begun = any(kind.tokens or kind.is_done or kind.usage for _, kind in batch)
            if begun or size_bytes > HEAD_BYTES_MAX:
                answer.patience_s = self._config.stream_idle_timeout_s
                return Opened(ranked, answer, first, rest, b"", {})
        raise AttemptFailed(Failure.BROKEN, f"{answer.route.node_id} ended before a token")

    async def _stream(
        self, journey: Journey, opened: Opened, client: Client, allowance: dict[str, str]
    ) -> None:
        """Pass the answer on, and end it in words where it breaks."""
        extra = {
            **allowance,
            headers.POP: opened.ranked.route.pop,
            headers.NODE: opened.ranked.route.node_id,
            headers.WHY: opened.ranked.why,
        }
        if opened.rest is None:
            await self._pass_whole(journey, opened, client, extra)
            return
        self._metrics.open_streams.inc()
        try:
            await client.begin(200, "text/event-stream; charset=utf-8", extra)
            if await self._pass_frames(journey, opened, opened.rest, client):
                journey.outcome = Outcome.COMPLETE
                await _see_the_end(opened.rest)
        except (AttemptFailed, sse.BrokenStream) as error:
            self._fleet.health.failed(opened.ranked.route.replica_id, self._clock())
            told = ApiError(ErrorCode.UPSTREAM, f"cannot go on with this answer: {error}")
            await client.send(client.error_event(told))
        finally:
            self._metrics.open_streams.dec()
        await client.end()
        self._learn(journey, opened.ranked)

    async def _pass_frames(
        self, journey: Journey, opened: Opened, rest: AsyncGenerator[Batch, None], client: Client
    ) -> bool:
        """Pass frames until `[DONE]` (True) or the node's own error event (False)."""
        batch = opened.first
        while True:
            shown = b"".join(_shown(frame, kind, journey) for frame, kind in batch)
            if shown:
                await client.send(shown)
            if any(kind.is_done for _, kind in batch):
                return True
            if any(kind.is_error for _, kind in batch):
                return False
            try:
                batch = await anext(rest)
            except StopAsyncIteration:
                raise AttemptFailed(
                    Failure.BROKEN, f"{opened.answer.route.node_id} ended the stream early"
                ) from None

    async def _pass_whole(
        self, journey: Journey, opened: Opened, client: Client, extra: dict[str, str]
    ) -> None:
        answer = opened.answer
        body = opened.body
        if answer.status == 200:
            _note_usage(journey, sse.usage_of(opened.decoded))
            if sse.with_cached_tokens(opened.decoded):
                body = msgspec.json.encode(opened.decoded)
            journey.outcome = Outcome.COMPLETE
        elif answer.retry_after:
            extra["retry-after"] = answer.retry_after
        await client.begin(answer.status, "application/json", extra)
        await client.send(body)
        await client.end()
        self._learn(journey, opened.ranked)

    def _learn(self, journey: Journey, ranked: Ranked) -> None:
        """Remember what the answer told: tokens per byte, and where the session sits."""
        asked = journey.asked
        if journey.prompt_tokens is not None:
            self._fleet.learned_tokens(
                asked.deployment.deployment_id, asked.text_bytes, journey.prompt_tokens
            )
            self._fleet.learned_cached(
                ranked.route, journey.sent, journey.prompt_tokens, journey.cached_tokens or 0
            )
        if asked.session and journey.outcome is Outcome.COMPLETE:
            prompt, _, output = journey.used
            self._fleet.sessions.sat(
                asked.session, ranked.route.replica_id, prompt + output, self._clock()
            )


def _charged(journey: Journey) -> int:
    prompt, _, output = journey.used
    return prompt + output


def _hold_to_status(answer: Answer) -> None:
    """Tell an answer that is the client's own affair from one that another replica may better."""
    node_id = answer.route.node_id
    if answer.refused:
        raise AttemptFailed(Failure.REFUSED, f"{node_id} refused: {answer.refused}", answer.refused)
    if answer.status >= 500:
        raise AttemptFailed(Failure.ERROR, f"{node_id} answered {answer.status}")
    if answer.status < 200 or 200 < answer.status < 400:
        raise AttemptFailed(Failure.BROKEN, f"{node_id} answered {answer.status}")


def _object(answer: Answer, body: bytes) -> dict[str, Any]:
    """Decode a whole answer, or raise: what is no JSON object is no answer, whatever its status."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        decoded = None
    if isinstance(decoded, dict) and (answer.status == 200 or "error" in decoded):
        return decoded
    if answer.status == 200:
        raise AttemptFailed(Failure.BROKEN, f"{answer.route.node_id} sent no JSON object")
    raise ApiError(
        ErrorCode.INVALID_REQUEST,
        f"cannot answer: the replica refused the request with status {answer.status}",
    )


async def _batches(answer: Answer) -> AsyncGenerator[Batch, None]:
    """Yield the frames of a stream, as many at a time as arrived together."""
    splitter = sse.FrameSplitter()
    try:
        async with aclosing(answer.chunks()) as chunks:
            async for chunk in chunks:
                batch = [(frame, sse.classify(frame)) for frame in splitter.feed(chunk)]
                if batch:
                    yield batch
    except sse.BrokenStream as error:
        raise AttemptFailed(Failure.BROKEN, f"{answer.route.node_id} sent {error}") from error


async def _see_the_end(rest: AsyncGenerator[Batch, None]) -> None:
    """Read what follows `[DONE]`, the end of the body, so that the connection can be kept."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in rest:
                return
    except (TimeoutError, AttemptFailed):
        # The client has everything; all that is lost is this connection.
        return


def _shown(frame: bytes, kind: sse.Kind, journey: Journey) -> bytes:
    """Return what the client sees of a frame, having counted it."""
    journey.chunks_seen += kind.tokens
    if kind.usage is None:
        return frame
    _note_usage(journey, kind.usage)
    if kind.is_usage_only and not journey.asked.wants_usage:
        return b""
    if kind.body is not None and sse.with_cached_tokens(kind.body):
        return sse.data_frame(kind.body)
    return frame


def _note_usage(journey: Journey, usage: sse.UsageCount | None) -> None:
    if usage is not None:
        journey.prompt_tokens = usage.prompt_tokens
        journey.cached_tokens = usage.cached_tokens
        journey.output_tokens = usage.output_tokens
