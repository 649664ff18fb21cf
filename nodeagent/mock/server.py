"""The mock's socket: OpenAI bodies in, frames out, with the doors that an agent asks at."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.door import error_response, errors_as, read_body
from isochrone.wire import headers
from isochrone.wire.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode, openai_error, openai_error_event
from isochrone.wire.ids import is_request_id
from nodeagent.mock import openai
from nodeagent.mock.engine import MockEngine
from nodeagent.mock.openai import GenerateRequest, Piece, Usage

log = logging.getLogger(__name__)

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
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors_as(_as_openai)])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
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
        runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        _clear(self._config.socket)
        await web.UnixSite(runner, self._config.socket).start()
        stats = self._engine.stats()
        ready = {"ready": True, "model": self._config.served_name, "load_s": stats.load_s}
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await stopping.wait()
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                await self._idle.wait()
        await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body, request_id, salt = await self._read(request)
        asked, wanted = openai.decode_chat(body, request_id, salt)
        return await self._answer(request, wanted, asked, is_chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body, request_id, salt = await self._read(request)
        asked, wanted = openai.decode_completion(body, request_id, salt)
        return await self._answer(request, wanted, asked, is_chat=False)

    async def _read(self, request: web.Request) -> tuple[bytes, str, bytes]:
        if self._draining:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot serve: this engine is draining", retry_after_s=1
            )
        body = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        request_id = request.headers.get(headers.REQUEST_ID, "")
        if not is_request_id(request_id):
            request_id = secrets.token_hex(12)
        return body, request_id, request.headers.get(headers.CACHE_SALT, "").encode()[:128]

    async def _answer(
        self,
        request: web.Request,
        wanted: GenerateRequest,
        asked: openai.ChatBody | openai.CompletionBody,
        *,
        is_chat: bool,
    ) -> web.StreamResponse:
        encoder = openai.Encoder(
            is_chat=is_chat,
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{wanted.request_id}",
            model=asked.model or self._config.served_name,
            created=int(time.time()),
        )
        self._open += 1
        self._idle.clear()
        try:
            async with aclosing(self._engine.generate(wanted)) as pieces:
                if asked.stream:
                    wants_usage = asked.stream_options is not None and (
                        asked.stream_options.include_usage
                    )
                    return await self._stream(request, pieces, encoder, wants_usage)
                return await self._whole(pieces, encoder)
        finally:
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    async def _stream(
        self,
        request: web.Request,
        pieces: AsyncGenerator[Piece, None],
        encoder: openai.Encoder,
        wants_usage: bool,
    ) -> web.StreamResponse:
        # Asked before the head is sent: what cannot be served gets a status, not a broken stream.
        first = await anext(pieces)
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-cache"}
        )
        await response.prepare(request)
        await response.write(encoder.first() + encoder.piece(first))
        usage = first.usage
        try:
            if first.finish_reason is None:
                async for piece in pieces:
                    await response.write(encoder.piece(piece))
                    usage = piece.usage or usage
        except ApiError as error:
            await response.write(openai_error_event(error))
            await response.write_eof()
            return response
        if wants_usage and usage is not None:
            await response.write(encoder.usage(usage))
        await response.write(openai.DONE)
        await response.write_eof()
        return response

    async def _whole(
        self, pieces: AsyncGenerator[Piece, None], encoder: openai.Encoder
    ) -> web.StreamResponse:
        texts: list[str] = []
        usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        finish_reason = "stop"
        async for piece in pieces:
            texts.append(piece.text)
            finish_reason = piece.finish_reason or finish_reason
            usage = piece.usage or usage
        body = encoder.whole("".join(texts), finish_reason, usage)
        return web.Response(body=body, content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self._config.served_name, "object": "model", "owned_by": "isochrone"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _health(self, request: web.Request) -> web.Response:
        health = self._engine.health()
        if self._draining and health.status == "ok":
            health = msgspec.structs.replace(health, status="draining")
        return web.Response(
            status=200 if health.status in ("ok", "draining") else 503,
            body=msgspec.json.encode(health),
            content_type="application/json",
        )

    async def _stats(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(self._engine.stats())
        return web.Response(body=body, content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = []
        for name, value in msgspec.structs.asdict(self._engine.stats()).items():
            if isinstance(value, str):
                continue
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(
                f"# TYPE isochrone_engine_{name} {kind}\nisochrone_engine_{name} {value}\n"
            )
        return web.Response(text="".join(lines), content_type="text/plain")

    async def _drain(self, request: web.Request) -> web.Response:
        self._draining = True
        return web.json_response({"open": self._open})


def _clear(socket: str) -> None:
    """Remove what an earlier life left, and let nobody but our user in."""
    Path(socket).unlink(missing_ok=True)
    os.umask(0o077)


def _as_openai(error: ApiError) -> web.Response:
    return error_response(error, msgspec.json.encode(openai_error(error)))
