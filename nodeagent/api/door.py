"""The node's data-plane door: routers' requests in, the engine's bytes back, untouched."""

import logging
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from isochrone.service.http_server import error_middleware, json_error, read_body
from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import ReplicaId
from isochrone.wire.report import ReplicaState
from nodeagent import metrics
from nodeagent.api.metrics_page import add_metrics
from nodeagent.api.siblings import SiblingLost, Siblings
from nodeagent.decide import passing
from nodeagent.decide.admission import Held
from nodeagent.supervisor import Replica, Supervisor

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0
RELAYED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank")
FORWARDED: Final = (
    "content-type",
    "traceparent",
    headers.REQUEST_ID,
    headers.CACHE_SALT,
    headers.SESSION_AFFINITY,
    headers.PRIORITY,
    headers.DEADLINE_MS,
    headers.SAID,
)
PASSED_ON: Final = (*FORWARDED, headers.TOKENS, headers.ROUTER)
ROUTER_BYTES_MAX: Final = 64
RETURNED: Final = ("content-type", "retry-after", "cache-control")


class Refused(Exception):
    """This node does not take the request; the router may take it elsewhere."""

    def __init__(self, word: str, status: int = 429, load: str = "") -> None:
        super().__init__(word)
        self.word = word
        self.status = status
        self.load = load


class Door:
    """Admits, relays, and tells the load with every answer."""

    def __init__(self, supervisor: Supervisor, siblings: Siblings) -> None:
        self._supervisor = supervisor
        self._siblings = siblings
        self.leaving = False

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application(middlewares=[error_middleware(json_error)])
        for path in RELAYED:
            app.router.add_post(path, self._relay)
        app.router.add_get("/ping", self._ping)
        app.router.add_get("/healthz", self._health)
        add_metrics(app, self._supervisor)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        await self._siblings.close()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        try:
            replica = self._find(request)
            body = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
            passed = await self._pass_on(request, replica, body)
            if passed is not None:
                return passed
            replica = self._find(request)
            _turn_away(request, replica)
            unread = _count(request.headers.get(headers.UNREAD_TOKENS, ""))
            prefill_ms = _count(request.headers.get(headers.PREFILL_MS, "")) or 0
            return await self._answer(request, replica, body, unread, prefill_ms)
        except Refused as refused:
            metrics.REQUESTS.labels(refused.word).inc()
            return refusal(refused.word, refused.status, refused.load)

    async def _answer(
        self,
        request: web.Request,
        replica: Replica,
        body: bytes,
        unread: int | None,
        prefill_ms: int,
    ) -> web.StreamResponse:
        """Let one of this node's replicas answer."""
        if not _is_open(replica):
            raise Refused("loading", 503)
        tokens = headers.parse_tokens(request.headers.get(headers.TOKENS, "")) or (
            len(body) // 4 + 1,
            256,
        )
        held = replica.in_flight.take(
            *tokens,
            unread,
            router=_router(request),
            prefill_ms=prefill_ms,
            now_s=monotonic(),
        )
        if held is None:
            raise Refused("busy", load=_load(request, replica))
        try:
            return await self._forward(request, replica, body, held)
        finally:
            held.release(monotonic())

    async def _pass_on(
        self, request: web.Request, replica: Replica, body: bytes
    ) -> web.StreamResponse | None:
        """Let a sibling answer where that begins sooner; None where none does, or will."""
        siblings = headers.parse_siblings(request.headers.get(headers.SIBLINGS, ""))
        waiting = replica.in_flight.left(monotonic())
        if not siblings or not passing.is_worth_asking(siblings[0], waiting):
            return None
        mine = {name: one for name, one in self._supervisor.replicas.items() if _is_open(one)}
        others = [one for one in siblings[1:] if one.replica_id not in mine]
        unread = await self._siblings.unread(others) if others else {}
        unread |= {name: one.in_flight.left(monotonic()) for name, one in mine.items()}
        most = _count(request.headers.get(headers.QUEUE_TOKENS_MAX, ""))
        verdict = passing.judge(siblings, unread, most)
        if verdict is None:
            return None
        sibling = verdict.sibling
        try:
            if sibling.replica_id in mine:
                one = mine[sibling.replica_id]
                told = (sibling.unread_tokens, sibling.prefill_ms)
                return await self._answer(request, one, body, *told)
            return await self._relay_on(request, body, verdict)
        except (Refused, SiblingLost):
            return None

    async def _relay_on(
        self, request: web.Request, body: bytes, verdict: passing.Verdict
    ) -> web.StreamResponse:
        """Let another node's replica answer through this one."""
        sibling = verdict.sibling
        sent = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        sent[headers.REPLICA] = sibling.replica_id
        sent[headers.UNREAD_TOKENS] = str(sibling.unread_tokens)
        sent[headers.PREFILL_MS] = str(sibling.prefill_ms)
        sent[headers.QUEUE_TOKENS_MAX] = str(verdict.queue_tokens_max)
        self._supervisor.relaying += 1
        try:
            async with self._siblings.answering(sibling, request.path, body, sent) as answer:
                response = _head_of(answer, (*RETURNED, headers.LOAD))
                response.headers[headers.PASSED] = sibling.replica_id
                await response.prepare(request)
                await _copy(request, response, answer.content.iter_any(), "passed_on")
                return response
        finally:
            self._supervisor.relaying -= 1

    def _find(self, request: web.Request) -> Replica:
        name = ReplicaId(request.headers.get(headers.REPLICA, ""))
        replica = self._supervisor.replicas.get(name)
        if replica is None or not replica.spec.leads:
            raise Refused("unknown_replica", 404)
        if self.leaving or replica.state is ReplicaState.DRAINING:
            raise Refused("draining")
        if replica.state is not ReplicaState.WARM or replica.engine is None:
            raise Refused("loading", 503)
        if headers.SAID in request.headers and not replica.engine.resumes:
            raise Refused(headers.CANNOT_RESUME, 501)
        return replica

    async def _forward(
        self, request: web.Request, replica: Replica, body: bytes, held: Held
    ) -> web.StreamResponse:
        engine = replica.engine
        assert engine is not None
        forwarded = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        body = engine.salted(request.path, body, forwarded.get(headers.CACHE_SALT, ""))
        try:
            async with engine.http.post(request.path, data=body, headers=forwarded) as answer:
                return await self._return(request, replica, answer, held)
        except (aiohttp.ClientError, OSError) as error:
            # Nothing was sent back yet: the router may ask another replica.
            metrics.REQUESTS.labels("engine_lost").inc()
            raise ApiError(
                ErrorCode.UPSTREAM, f"cannot answer: the engine broke ({type(error).__name__})"
            ) from error

    async def _return(
        self,
        request: web.Request,
        replica: Replica,
        answer: aiohttp.ClientResponse,
        held: Held,
    ) -> web.StreamResponse:
        response = _head_of(answer, RETURNED)
        if answer.status == 429:
            response.headers[headers.REFUSED] = "busy"
        if replica.spec.replica_id != request.headers.get(headers.REPLICA):
            response.headers[headers.PASSED] = replica.spec.replica_id
        if headers.SAID in request.headers and replica.engine is not None:
            response.headers[headers.RESUMED] = replica.engine.resumes
        chunks = answer.content.iter_any()
        first = await anext(chunks, b"")
        held.first_token(monotonic())
        # As it is now that this prompt is read, and not as it was when it came.
        response.headers[headers.LOAD] = _load(request, replica)
        await response.prepare(request)
        await _copy(request, response, _all_of(first, chunks, replica), "answered")
        return response

    async def _ping(self, request: web.Request) -> web.Response:
        """Answer at once, with all loads: what a router measures its round trips with.

        Asked about a replica, disown one that is gone: a router that doubts its table asks so.
        """
        if headers.REPLICA in request.headers:
            try:
                self._find(request)
            except Refused as refused:
                if refused.word in ("unknown_replica", "draining"):
                    return refusal(refused.word, refused.status)
        loads = {
            replica_id: replica.in_flight.load(_router(request), monotonic())
            for replica_id, replica in self._supervisor.replicas.items()
            if replica.state is ReplicaState.WARM
        }
        return web.Response(status=204, headers={headers.LOADS: headers.format_loads(loads)})

    async def _health(self, request: web.Request) -> web.Response:
        states = [replica.state.value for replica in self._supervisor.replicas.values()]
        status = "draining" if self.leaving else "ok"
        counted = {state: states.count(state) for state in set(states)}
        return web.json_response({"status": status, "replicas": counted})


def _is_open(replica: Replica) -> bool:
    return replica.state is ReplicaState.WARM and replica.engine is not None


def _head_of(answer: aiohttp.ClientResponse, returned: Sequence[str]) -> web.StreamResponse:
    """Begin the answer to a router as the engine, or a sibling's door, began it."""
    response = web.StreamResponse(status=answer.status)
    for name in returned:
        if name in answer.headers:
            response.headers[name] = answer.headers[name]
    if answer.content_length is not None:
        response.content_length = answer.content_length
    return response


async def _all_of(
    first: bytes, chunks: AsyncIterator[bytes], replica: Replica
) -> AsyncIterator[bytes]:
    """Give what was read already, and the rest, counting it."""
    if first:
        replica.bytes_out += len(first)
        yield first
    async for chunk in chunks:
        replica.bytes_out += len(chunk)
        yield chunk


async def _copy(
    request: web.Request,
    response: web.StreamResponse,
    chunks: AsyncIterator[bytes],
    outcome: str,
) -> None:
    """Pass an answer's body on to its end; where its source breaks, so does this."""
    try:
        async for chunk in chunks:
            await response.write(chunk)
    except aiohttp.ClientConnectionResetError:
        metrics.REQUESTS.labels("client_left").inc()
        return
    except aiohttp.ClientError:
        # It died in mid-answer: an abort, not an end, is what the router must see.
        metrics.REQUESTS.labels("engine_lost").inc()
        if request.transport is not None:
            request.transport.abort()
        return
    await response.write_eof()
    metrics.REQUESTS.labels(outcome).inc()


def _turn_away(request: web.Request, replica: Replica) -> None:
    """Refuse where more waits than the router chose by: it may know better, and learns our load."""
    most = _count(request.headers.get(headers.QUEUE_TOKENS_MAX, ""))
    if most is not None and replica.in_flight.left(monotonic()) > most:
        raise Refused(headers.QUEUED, load=_load(request, replica))


def _load(request: web.Request, replica: Replica) -> str:
    """Write a replica's load, as it is told to who asks."""
    return headers.format_load(replica.in_flight.load(_router(request), monotonic()))


def _router(request: web.Request) -> str:
    return request.headers.get(headers.ROUTER, "")[:ROUTER_BYTES_MAX]


def _count(value: str) -> int | None:
    """Read a header's count of tokens; None where it is none."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 12 else None


def refusal(word: str, status: int, load: str = "") -> web.Response:
    """Say in a word why not, and that it may be asked again in a second."""
    error = {"error": {"code": "refused", "message": f"cannot serve: {word}"}}
    response = web.Response(
        status=status,
        body=msgspec.json.encode(error),
        content_type="application/json",
        headers={headers.REFUSED: word, "retry-after": "1"},
    )
    if load:
        response.headers[headers.LOAD] = load
    return response
