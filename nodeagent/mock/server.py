"""The mock engine's HTTP server: OpenAI's routes, and those that the agent uses."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import (
    error_middleware,
    json_response,
    openai_json_error,
    read_body,
    serve_http_unix,
)
from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine import EngineConfig, EngineHealth
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.ids import is_request_id
from nodeagent.mock import answers, media, openai
from nodeagent.mock.engine import MockEngine, MockRequest, MockToken

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0


class MockServer:
    """Serves one mock engine on one Unix socket."""

    def __init__(self, engine: MockEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._in_flight = 0
        self._is_draining = False
        self._is_asleep = False
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(
            client_max_size=media.AUDIO_BYTES_MAX, middlewares=[error_middleware(openai_json_error)]
        )
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/audio/transcriptions", media.transcribe)
        app.router.add_post("/v1/audio/translations", media.transcribe)
        app.router.add_post("/v1/audio/speech", media.speak)
        app.router.add_post("/v1/images/generations", media.draw)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        return app

    async def serve(self) -> None:
        """Serve until SIGTERM, then wait for the requests in flight, for at most `drain_s`."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        path = Path(self._config.socket)
        # An earlier process may have left its socket.
        path.unlink(missing_ok=True)
        async with serve_http_unix(self.app(), path, encode_error=openai_json_error):
            await stopping.wait()
            self._is_draining = True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_s):
                    await self._idle.wait()

    async def answer(self, http_request: web.Request) -> web.StreamResponse:
        """Answer a chat or a completion."""
        if self._is_draining:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot serve the request: this engine is draining",
                retry_after_s=1,
            )
        if self._is_asleep:
            # Unlike a real engine: a test must see that the agent did not wake it.
            raise ApiError(ErrorCode.UNAVAILABLE, "cannot serve the request: this engine sleeps")
        body = openai.decode(
            await read_body(http_request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        )
        is_chat = http_request.path == "/v1/chat/completions"
        salt = http_request.headers.get(headers.CACHE_SALT, "")[:128]
        request = openai.mock_request(body, is_chat=is_chat, salt=salt)
        priority = parse_digits(http_request.headers.get(headers.PRIORITY, ""), 3)
        if priority is not None:
            request = request._replace(priority=priority)
        request_id = http_request.headers.get(headers.REQUEST_ID, "")
        encoder = answers.MockAnswerEncoder(
            is_chat=is_chat,
            request_id=request_id if is_request_id(request_id) else secrets.token_hex(12),
            model=body.model or self._config.served_name,
            created=int(time.time()),
            alternatives=body.alternatives,
        )
        self._in_flight += 1
        self._idle.clear()
        try:
            async with aclosing(self._engine.generate(request)) as tokens:
                if not body.stream:
                    return await _complete(request, tokens, encoder)
                wants_usage = bool((body.stream_options or {}).get("include_usage"))
                return await _stream(http_request, request, tokens, encoder, wants_usage)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def _sleep(self, http_request: web.Request) -> web.Response:
        if self._in_flight:
            raise ApiError(ErrorCode.CONFLICT, "cannot sleep: requests are open")
        self._is_asleep = True
        return json_response({"is_sleeping": True})

    async def _wake_up(self, http_request: web.Request) -> web.Response:
        self._is_asleep = False
        return json_response({"is_sleeping": False})

    async def _is_sleeping(self, http_request: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._is_asleep})

    async def tokenize(self, http_request: web.Request) -> web.Response:
        """Count the tokens of a chat's prompt."""
        body = openai.decode(
            await read_body(http_request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        )
        request = openai.mock_request(body, is_chat=True, salt="")
        return json_response({"count": request.prompt_tokens})

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self._config.served_name, "object": "model", "owned_by": "isochrone"}
        return json_response({"object": "list", "data": [entry]})

    async def _health(self, request: web.Request) -> web.Response:
        """Report that the engine is healthy, even if option `zombie` makes it hang."""
        tokens_out = self._engine.tokens_out
        health = EngineHealth(
            status="draining" if self._is_draining else "ok",
            model=self._config.served_name,
            steps=tokens_out,
            tokens_out=tokens_out,
            last_step_age_s=time.monotonic() - self._engine.last_token_at,
        )
        return json_response(health)

    async def _stats(self, request: web.Request) -> web.Response:
        return json_response(self._engine.stats())

    async def _metrics(self, request: web.Request) -> web.Response:
        stats = msgspec.structs.asdict(self._engine.stats())
        del stats["kind"]
        lines = [
            f"# HELP isochrone_engine_{name} Mock engine: {name.replace('_', ' ')}\n"
            f"# TYPE isochrone_engine_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"isochrone_engine_{name} {float(value)}\n"
            for name, value in stats.items()
        ]
        return web.Response(text="".join(lines), content_type="text/plain")

    async def _drain(self, request: web.Request) -> web.Response:
        self._is_draining = True
        return json_response({"open": self._in_flight})


async def _stream(
    http_request: web.Request,
    request: MockRequest,
    tokens: AsyncGenerator[MockToken, None],
    encoder: answers.MockAnswerEncoder,
    wants_usage: bool,
) -> web.StreamResponse:
    # The first token is awaited before the head is sent, so that an error still gets its status.
    token = await anext(tokens)
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream", "cache-control": "no-cache"}
    )
    await response.prepare(http_request)
    answer_count = len(request.prompts) * request.answers
    await response.write(encoder.first_chunks(answer_count) + encoder.token_chunk(token))
    output_tokens = 1
    async for token in tokens:
        output_tokens += 1
        await response.write(encoder.token_chunk(token))
    usage = answers.usage_of(request.prompt_tokens, output_tokens, token.cached)
    usage_chunk = encoder.usage_chunk(usage) if wants_usage else b""
    await response.write(usage_chunk + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _complete(
    request: MockRequest,
    tokens: AsyncGenerator[MockToken, None],
    encoder: answers.MockAnswerEncoder,
) -> web.Response:
    generated = [token async for token in tokens]
    usage = answers.usage_of(request.prompt_tokens, len(generated), generated[-1].cached)
    by_answer = [
        [token for token in generated if token.answer == number]
        for number in range(len(request.prompts) * request.answers)
    ]
    return web.Response(body=encoder.complete(by_answer, usage), content_type="application/json")
