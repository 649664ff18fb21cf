"""The mock's socket: OpenAI bodies in, frames out, with the doors that an agent asks at."""

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.http_server import (
    error_middleware,
    error_response,
    read_body,
    serve_http_unix,
)
from isochrone.wire import headers
from isochrone.wire.engine import EngineConfig, EngineHealth
from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.ids import is_request_id
from nodeagent.mock import openai
from nodeagent.mock.engine import Asked, MockEngine, Piece

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0


class Server:
    """Serves one engine on one Unix socket until it is told to stop."""

    def __init__(self, engine: MockEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> web.Application:
        """Return the routes."""
        app = web.Application(
            client_max_size=BODY_BYTES_MAX, middlewares=[error_middleware(_as_openai)]
        )
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/drain", self._drain)
        return app

    async def serve(self) -> None:
        """Serve until SIGTERM, then finish what is open, for `drain_s` at most."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        path = Path(self._config.socket)
        # What an earlier life left goes.
        path.unlink(missing_ok=True)
        async with serve_http_unix(self.app(), path, encode_error=_as_openai):
            await stopping.wait()
            self._draining = True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_s):
                    await self._idle.wait()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._draining:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot serve: this engine is draining", retry_after_s=1
            )
        body = openai.read(
            await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        )
        is_chat = request.path == "/v1/chat/completions"
        salt = request.headers.get(headers.CACHE_SALT, "")[:128]
        asked = openai.asked_of(body, is_chat=is_chat, salt=salt)
        request_id = request.headers.get(headers.REQUEST_ID, "")
        encoder = openai.Encoder(
            is_chat=is_chat,
            request_id=request_id if is_request_id(request_id) else secrets.token_hex(12),
            model=body.model or self._config.served_name,
            created=int(time.time()),
        )
        self._open += 1
        self._idle.clear()
        try:
            async with aclosing(self._engine.generate(asked)) as pieces:
                if not body.stream:
                    return await _whole(asked, pieces, encoder)
                wants_usage = bool((body.stream_options or {}).get("include_usage"))
                return await _stream(request, asked, pieces, encoder, wants_usage)
        finally:
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self._config.served_name, "object": "model", "owned_by": "isochrone"}
        return _json({"object": "list", "data": [entry]})

    async def _health(self, request: web.Request) -> web.Response:
        """Say that all is well; a zombie says so too."""
        tokens_out = self._engine.tokens_out
        health = EngineHealth(
            status="draining" if self._draining else "ok",
            model=self._config.served_name,
            steps=tokens_out,
            tokens_out=tokens_out,
            last_step_age_s=time.monotonic() - self._engine.last_token_at,
        )
        return _json(health)

    async def _stats(self, request: web.Request) -> web.Response:
        return _json(self._engine.stats())

    async def _metrics(self, request: web.Request) -> web.Response:
        told = msgspec.structs.asdict(self._engine.stats())
        del told["kind"]
        lines = [
            f"# TYPE isochrone_engine_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"isochrone_engine_{name} {float(value)}\n"
            for name, value in told.items()
        ]
        return web.Response(text="".join(lines), content_type="text/plain")

    async def _drain(self, request: web.Request) -> web.Response:
        self._draining = True
        return _json({"open": self._open})


async def _stream(
    request: web.Request,
    asked: Asked,
    pieces: AsyncGenerator[Piece, None],
    encoder: openai.Encoder,
    wants_usage: bool,
) -> web.StreamResponse:
    # Asked before the head is sent: what cannot be served gets a status, not a broken stream.
    piece = await anext(pieces)
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream", "cache-control": "no-cache"}
    )
    await response.prepare(request)
    await response.write(encoder.first() + encoder.piece(piece.text, is_last=piece.is_last))
    async for piece in pieces:
        await response.write(encoder.piece(piece.text, is_last=piece.is_last))
    usage = openai.used(len(asked.words), asked.max_tokens, piece.cached)
    await response.write((encoder.usage(usage) if wants_usage else b"") + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _whole(
    asked: Asked, pieces: AsyncGenerator[Piece, None], encoder: openai.Encoder
) -> web.Response:
    said = [piece async for piece in pieces]
    usage = openai.used(len(asked.words), len(said), said[-1].cached)
    body = encoder.whole("".join(piece.text for piece in said), usage)
    return web.Response(body=body, content_type="application/json")


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _as_openai(error: ApiError) -> web.Response:
    return error_response(error, msgspec.json.encode(openai_error(error)))
