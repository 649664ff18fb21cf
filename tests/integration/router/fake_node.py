"""A fake node for tests: it generates numbered tokens ("t0 t1 ...") and has configurable faults."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import StreamReader, web

from isochrone.service.network.http_server import HttpServerLimits, serve_http
from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from nodeagent.api.pop_loads import PopLoadReader
from nodeagent.api.request.handoff_notice import announce_prefill, announce_replica
from nodeagent.mock import media


class FakeNode:
    """One node. Its attributes define its behaviour and may be changed at any time.

    - `cut_at`, `hang_at`, `error_at`: the token at which a stream breaks, stalls or fails.
    - `cuts_all`: whether it breaks every stream at its next token.
    - `refuse`: the reason in its refusals.
    - `requests_max`: how many requests it serves at once, 0 for any number.
    - `handed_off_to`: the replica that it names as answering.
    - `announces`: whether it announces `handed_off_to` in an interim response, then waits for
      `may_answer`; with `takes_back` it says that it serves the request itself after all.
    - `read_by`: the replicas that read a prompt, one after the other; it waits for `may_answer`.
    - `resumes`: how it says that it continues a text; empty if it cannot.
    - `prompt_tokens`: the tokens of a prompt as it says at the beginning of a stream; 0: not.
    - `preface`: frames that a stream begins with, before its first token.
    - `loads`: the header of its pongs, after `ping_s`. `loads_reader`: how it answers for its PoP.
    - `status`: what it answers instead of 200, to a sound or image with `error_body`.
    - `probs`: what it says of each text to classify.
    - `splits_bytes`: send a stream byte by byte. `filler` is added to each token.
    """

    def __init__(self, name: str = "n1", pop: str = "ams") -> None:
        self.name = name
        self.pop = pop
        self.port = 0
        self.tokens = 8
        self.itl_s = 0.0
        self.ttft_s = 0.0
        self.refuse = ""
        self.requests_max = 0
        self.status = 200
        self.error_body: bytes | None = None
        self.cut_at: int | None = None
        self.cuts_all = False
        self.hang_at: int | None = None
        self.garbage = False
        self.plain_garbage = False
        self.resumes = ""
        self.prompt_tokens = 0
        self.filler = ""
        self.preface: list[bytes] = []
        self.splits_bytes = False
        self.sent = 0
        self.error_at: int | None = None
        self.error_code: str | int = "internal_error"
        self.cached_tokens: int | None = 3
        self.probs = [0.1, 0.7, 0.2]
        self.load = self.loads = ""
        self.pings = self.pop_queries = 0
        self.ping_s = 0.0
        self.loads_reader: PopLoadReader | None = None
        self.handed_off_to = ""
        self.announces = self.takes_back = False
        self.may_answer = asyncio.Event()
        self.read_by: list[str] = []
        self.disowned: set[str] = set()
        self.bodies: list[bytes] = []
        self.request_headers: list[dict[str, str]] = []
        self.errors = 0
        self.running = 0
        self.running_max = 0
        self.cancelled = 0
        self.changed = asyncio.Condition()

    @property
    def address(self) -> str:
        """The address in its routes."""
        return f"127.0.0.1:{self.port}"

    @property
    def requests(self) -> int:
        """The number of requests received."""
        return len(self.bodies)

    async def note(self) -> None:
        """Wake the tests that wait in `until`."""
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Any, timeout_s: float = 30.0) -> None:
        """Wait until `condition()` is true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def ping(self, request: web.Request) -> web.Response:
        """Answer a probe."""
        if request.headers.get(headers.REPLICA) in self.disowned:
            return web.Response(status=429, headers={headers.REFUSED: "unknown_replica"})
        self.pings += 1
        await asyncio.sleep(self.ping_s)
        return web.Response(status=204, headers={headers.LOADS: self.loads})

    async def pop_loads(self, request: web.Request) -> web.Response:
        """Answer for nodes of the PoP, as a real node does; 404 as one of an older release."""
        self.pop_queries += 1
        if self.loads_reader is None:
            return web.Response(status=404)
        return await self.loads_reader.handle(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, with the configured faults."""
        body = await request.read()
        self.bodies.append(body)
        self.request_headers.append(dict(request.headers))
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        await self.note()
        try:
            return await self._answer(request, json.loads(body))
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            await asyncio.shield(self.note())

    async def tokenize(self, request: web.Request) -> web.Response:
        """Count a chat's tokens: one for each word of a text."""
        body = await request.read()
        self.bodies.append(body)
        messages = json.loads(body)["messages"]
        count = sum(len(str(message.get("content")).split()) for message in messages)
        return web.json_response({"count": count, "max_model_len": 4096})

    async def media(self, request: web.Request) -> web.StreamResponse:
        """Answer as the mock engine does, or break off after the first part."""
        body = await request.read()
        self.bodies.append(body)
        self.request_headers.append(dict(request.headers))
        await self.note()
        if self.status != 200 and self.error_body is None:
            return self._error({})
        if self.status != 200:
            return web.Response(body=self.error_body, status=self.status, content_type="text/plain")
        # The mock engine reads it, too.
        request._payload = StreamReader(request.protocol, len(body) + 1)
        request._payload.feed_data(body)
        request._payload.feed_eof()
        request._read_bytes = None
        if self.cut_at is not None:
            response = web.StreamResponse(headers={"content-type": "audio/wav"})
            await response.prepare(request)
            await response.write(b"RIFF")
            await self.may_answer.wait()
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.path == "/v1/audio/speech":
            return await media.speak(request)
        if request.path == "/v1/images/generations":
            return await media.draw(request)
        return await media.transcribe(request)

    async def classify(self, request: web.Request) -> web.Response:
        """Answer as vLLM does, with `probs` for each text."""
        body = json.loads(await request.read())
        self.bodies.append(json.dumps(body).encode())
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [
            {"index": index, "label": "?", "probs": self.probs, "num_classes": len(self.probs)}
            for index in range(len(texts))
        ]
        usage = {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0}
        head = {"id": "classify-1", "object": "list", "created": 1, "model": body["model"]}
        return web.json_response({**head, "data": data, "usage": usage})

    async def embed(self, request: web.Request) -> web.Response:
        """Answer with the same vector for each input."""
        body = json.loads(await request.read())
        if self.status != 200:
            return self._error({})
        given = body["input"]
        is_one = isinstance(given, str) or isinstance(given[0], int)
        item = {"object": "embedding", "embedding": [0.6, 0.8]}
        data = [{**item, "index": index} for index in range(1 if is_one else len(given))]
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        answer = {"object": "list", "model": body["model"], "data": data, "usage": usage}
        return web.json_response(answer)

    async def rank(self, request: web.Request) -> web.Response:
        """Answer that each document is as relevant as the others."""
        body = json.loads(await request.read())
        if self.status != 200:
            return self._error({})
        results = [
            {"index": index, "relevance_score": 0.5} for index in range(len(body["documents"]))
        ]
        usage = {"prompt_tokens": 7, "total_tokens": 7}
        answer = {"id": "r-1", "model": body["model"], "results": results, "usage": usage}
        return web.json_response(answer)

    def _error(self, extra: dict[str, str]) -> web.Response:
        self.errors += 1
        error = {"error": {"message": "broken", "type": "x", "code": "x", "param": None}}
        return web.json_response(error, status=self.status, headers=extra)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        extra = {headers.LOAD: self.load} if self.load else {}
        for replica_id in self.read_by:
            await announce_prefill(request, ReplicaId(replica_id))
            await self.may_answer.wait()
            self.may_answer.clear()
        if self.announces:
            await announce_replica(request, ReplicaId(self.handed_off_to))
            await self.may_answer.wait()
        if self.takes_back:
            await announce_replica(request, ReplicaId(request.headers[headers.REPLICA]))
        elif self.handed_off_to:
            extra[headers.HANDOFF_REPLICA] = self.handed_off_to
        if headers.GENERATED_TOKENS in request.headers and self.resumes:
            extra[headers.RESUMED] = self.resumes
        if self.prompt_tokens:
            extra[headers.PROMPT_TOKENS] = str(self.prompt_tokens)
        is_full = 0 < self.requests_max < self.running
        if self.requests_max:
            extra[headers.LOAD] = f"p=0;d=0;r={self.running - is_full};w=0"
        if refused := self.refuse or (headers.BUSY if is_full else ""):
            return web.Response(status=429, headers={headers.REFUSED: refused, **extra})
        if self.status != 200:
            return self._error(extra)
        if self.plain_garbage:
            return web.Response(body=b"\xff\xfe nonsense", headers=extra)
        await asyncio.sleep(self.ttft_s)
        count = body.get("max_tokens") or self.tokens
        if not body.get("stream"):
            words = " ".join(f"t{n}" for n in range(count))
            is_chat = "messages" in body
            message = {"role": "assistant", "content": words}
            said = {"message": message} if is_chat else {"text": words}
            choice = {"index": 0, **said, "finish_reason": "stop"}
            whole = {
                **self._head("chat.completion" if is_chat else "text_completion"),
                "choices": [choice],
                "usage": self._usage(count),
            }
            return web.json_response(whole, headers=extra)
        return await self._stream(request, count, body, extra)

    async def _stream(
        self, request: web.Request, count: int, body: dict[str, Any], extra: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **extra})
        await response.prepare(request)

        async def send(data: object) -> None:
            frame = b"data: " + json.dumps(data).encode() + b"\n\n"
            for piece in (
                [frame[n : n + 1] for n in range(len(frame))] if self.splits_bytes else [frame]
            ):
                await response.write(piece)
            self.sent += 1

        head = self._head("chat.completion.chunk")
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await send({**head, "choices": [first]})
        for frame in self.preface:
            await response.write(frame)
        begin = 0
        if request.headers.get(headers.GENERATED_TOKENS) and self.resumes:
            generated = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            begin = int(generated.split()[-1][1:]) + 1
        for n in range(begin, begin + count):
            if self.cuts_all or n == self.cut_at:
                assert request.transport is not None
                request.transport.abort()
                return response
            if n == self.hang_at:
                await asyncio.Event().wait()
            if n == self.error_at:
                await send({"error": {"message": "engine died", "code": self.error_code}})
                return response
            if self.garbage:
                await response.write(b'data: {"usage": nonsense\n\n')
            text = f"t{n} {self.filler}"
            delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            await send({**head, "choices": [delta]})
            await asyncio.sleep(self.itl_s)
        await send({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await send({**head, "choices": [], "usage": self._usage(count)})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _head(self, kind: str) -> dict[str, Any]:
        created = 1 + sum(map(ord, self.name))
        return {"id": f"c-{self.name}", "object": kind, "created": created, "model": "tiny"}

    def _usage(self, count: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": 11,
            "completion_tokens": count,
            "total_tokens": 11 + count,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


@asynccontextmanager
async def open_node(node: FakeNode, port: int = 0) -> AsyncIterator[FakeNode]:
    """Serve `node` on loopback."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_get("/ping", node.ping)
    app.router.add_post("/v1/chat/completions", node.generate)
    app.router.add_post("/v1/completions", node.generate)
    app.router.add_post("/v1/embeddings", node.embed)
    app.router.add_post("/v1/rerank", node.rank)
    app.router.add_post("/tokenize", node.tokenize)
    app.router.add_post("/classify", node.classify)
    app.router.add_post("/v1/audio/transcriptions", node.media)
    app.router.add_post("/v1/audio/translations", node.media)
    app.router.add_post("/v1/audio/speech", node.media)
    app.router.add_post("/v1/images/generations", node.media)
    app.router.add_post("/loads", node.pop_loads)
    limits = HttpServerLimits(shutdown_timeout_s=0.2)
    async with serve_http(app, "127.0.0.1", port, limits=limits) as bound:
        node.port = bound
        yield node
