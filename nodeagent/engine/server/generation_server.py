"""The server of a model that generates text: chats, completions and adapters.

However a request ends, none of its sequences stays in the engine.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.engines.engine_times import ENGINE_TIMES, format_times
from isochrone.wire.errors import ApiError, ErrorCode, openai_error_event
from isochrone.wire.http.headers import PROMPT_TOKENS, REQUEST_ID, TRACEPARENT
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent.engine.core.generation import GenerationDelta
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.tier_setup import open_store
from nodeagent.engine.loading import LoadedEngine
from nodeagent.engine.scheduler.sequence import FinishReason
from nodeagent.engine.server.adapters import AdapterRegistry
from nodeagent.engine.server.http_routes import ModelServer
from nodeagent.engine.server.kv.kv_reading import SHARED_BYTES_MAX
from nodeagent.engine.server.kv.kv_receiving import KvReceiver
from nodeagent.engine.server.kv.kv_sending import KvSender
from nodeagent.engine.server.kv.kv_sharing import KvSharing
from nodeagent.engine.server.kv.kv_store import KvStoreRoutes
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.open_requests import OpenRequest, OpenRequests
from nodeagent.engine.server.openai.request_body import read_chat, read_completion
from nodeagent.engine.server.openai.response_body import CompletionResponse, ResponseChoice
from nodeagent.engine.server.prepared_request import PreparedRequest, RequestPreparer
from nodeagent.engine.server.request_clock import RequestClock
from nodeagent.engine.server.sleep import EngineSleep
from nodeagent.engine.workers.worker_group import WorkerGroup

_FAILURES: Final = frozenset({FinishReason.ERROR, FinishReason.LATE, FinishReason.INVALID})


class GenerationServer(ModelServer):
    """The HTTP handlers of a text generator, with its step thread and its open requests."""

    worker: GenerationThread

    def __init__(
        self,
        config: EngineConfig,
        workers: WorkerGroup,
        loaded: LoadedEngine,
        on_death: Callable[[], None],
    ) -> None:
        super().__init__(config)
        engine = loaded.engine
        self.loaded = loaded
        self.context_tokens = min(loaded.context_tokens, engine.scheduler.sequence_tokens_max)
        self.open_requests = OpenRequests(
            loaded.vocabulary, self.inflight, config.client_queue_max, engine.speculation
        )
        self.worker = GenerationThread(engine, self.open_requests.publish, on_death)
        for worker in workers.workers:
            # The descriptor becomes readable when the worker process ends.
            asyncio.get_running_loop().add_reader(worker.descriptor, self.worker.fail)
        buffer_bytes = max(SHARED_BYTES_MAX, loaded.kv_blocks.block_bytes)
        staging = StagingMemory(buffer_bytes, config.device)
        self.sleep = EngineSleep(config, loaded, self.worker, self.inflight, staging)
        self.adapters = AdapterRegistry(config, loaded.active_adapters, loaded.dtype)
        self._preparer = RequestPreparer(config, loaded, self.adapters, self.context_tokens)
        socket = Path(config.socket).with_name(kv_transfer.WINDOW_SOCKET_NAME)
        self.kv_windows = KvWindows(loaded.kv_blocks, socket, staging, config.device)
        self.kv_sender = KvSender(
            config,
            loaded.kv_blocks,
            self.worker,
            engine.kv_transfers,
            self.open_requests,
            self.kv_windows,
            self.sleep.ensure_awake,
        )
        waiting_max = config.sequences_max + config.waiting_max
        mover = engine.block_mover
        self.kv_receiver = KvReceiver(
            loaded.kv_blocks,
            self.worker,
            engine.kv_transfers,
            waiting_max,
            staging=staging,
            host_blocks=mover.host.total if mover is not None else None,
        )
        files = mover.files if mover is not None else None
        self.kv_sharing = KvSharing(
            loaded.kv_blocks,
            self.worker,
            engine.kv_transfers,
            files,
            self.kv_windows,
            staging,
            config.client_stall_s,
        )
        self.kv_store = open_store(config, loaded.kv_blocks)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        self.open_requests.fail_all(message)

    def close(self) -> None:
        """Save the prefix cache for the next process. Called after the last step."""
        self.loaded.engine.close()

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = super().app()
        app.on_startup.append(self._start_parts)
        app.on_cleanup.append(self._close_parts)
        self.kv_receiver.attach(app)
        self.kv_sharing.attach(app)
        if self.kv_store is not None:
            form, store = self.loaded.kv_blocks, self.kv_store
            KvStoreRoutes(form, store, self.kv_receiver, self.kv_sharing).attach(app)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/sleep", self.fall_asleep)
        app.router.add_post("/wake_up", self.wake_up)
        app.router.add_get("/is_sleeping", self.is_sleeping)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/load_lora_adapter", self.load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        return app

    def counts(self) -> Mapping[str, float]:
        """Return the counts of EngineStats that the step thread lacks, and further ones."""
        engine = self.loaded.engine
        mover, speculation = engine.block_mover, engine.speculation
        return {
            "block_tokens": BLOCK_TOKENS,
            "open": self.inflight.in_flight,
            "is_waiting_for_peers": not self.worker.is_busy and self._has_transfers(),
            "clients_cut_total": self.open_requests.cut_total,
            "load_s": self.loaded.load_s,
            "weights_bytes": self.loaded.weights_bytes,
            "context_tokens": self.context_tokens,
            "wakes_total": self.sleep.wakes_total,
            "wake_s": round(self.sleep.wake_s, 4),
            **(mover.counts() if mover is not None else {}),
            **engine.kv_transfers.counts(),
            **self.kv_receiver.counts(),
            **self.kv_sharing.counts(),
            **self.kv_windows.pool.counts(),
            **(self.kv_store.counts() if self.kv_store is not None else {}),
            **(speculation.counts() if speculation is not None else {}),
            "adapters": len(self.adapters.names),
            "adapters_kept": self.adapters.cached,
            "adapter_reads_total": self.adapters.reads_total,
        }

    def _has_transfers(self) -> bool:
        is_held = self.loaded.engine.kv_transfers.held_blocks > 0
        return is_held or self.kv_sender.open_count > 0 or self.kv_receiver.is_waiting

    @property
    def other_names(self) -> Sequence[str]:
        """The adapters' names."""
        return self.adapters.names

    async def fall_asleep(self, request: web.Request) -> web.Response:
        """Drop the model and its KV until a wake; 409 while requests are open."""
        await self.sleep.fall_asleep()
        return json_response({"is_sleeping": True})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Load the model again."""
        await self.sleep.wake()
        return json_response({"is_sleeping": False, "wake_s": self.sleep.wake_s})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        """Return whether the model is dropped."""
        return json_response({"is_sleeping": self.sleep.is_dropped})

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Load an adapter, so that requests may name it as their model."""
        return json_response({"loaded": await self.adapters.load(await self.body(request))})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        """Forget an adapter; requests that run with it continue."""
        body = await self.body(request, frees_memory=True)
        return json_response({"unloaded": self.adapters.unload(body)})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        self.inflight.check()
        body = read_chat(await self.body(request), self.config.body_bytes_max)
        prepared = await self._preparer.prepare_chat(body, request.headers)
        return await self._generate(request, prepared, is_chat=True)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a plain completion."""
        self.inflight.check()
        body = read_completion(await self.body(request), self.config.body_bytes_max)
        prepared = await self._preparer.prepare_completion(body, request.headers)
        return await self._generate(request, prepared, is_chat=False)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Count the tokens of a chat's prompt. Path and body are vLLM's, without the tokens."""
        self.inflight.check()
        body = read_chat(await self.body(request), self.config.body_bytes_max)
        count = await self._preparer.count_chat_tokens(body)
        return json_response({"count": count, "max_model_len": self.context_tokens})

    async def _start_parts(self, app: web.Application) -> None:
        await self.kv_windows.start()
        self.loaded.first_touch.start()

    async def _close_parts(self, app: web.Application) -> None:
        await self.kv_windows.close()
        self._preparer.close()

    async def _generate(
        self, request: web.Request, prepared: PreparedRequest, *, is_chat: bool
    ) -> web.StreamResponse:
        """Run a prepared request and write its response, or the KV of its prompt."""
        self.check_alive()
        await self.sleep.ensure_awake()
        if request.headers.get(kv_transfer.LEG) == kv_transfer.PREFILL_LEG:
            return await self.kv_sender.send(request, prepared, _raise_failure)
        clock = RequestClock(time.monotonic)
        transfer = request.headers.get(kv_transfer.TRANSFER)
        if transfer is None:
            return await self._answer(request, prepared, clock, is_chat=is_chat)
        async with self.kv_receiver.hold(transfer, prepared):
            clock.record_kv()
            return await self._answer(request, prepared, clock, is_chat=is_chat, transfer=transfer)

    async def _answer(
        self,
        request: web.Request,
        prepared: PreparedRequest,
        clock: RequestClock,
        *,
        is_chat: bool,
        transfer: str | None = None,
    ) -> web.StreamResponse:
        """Start the generations of a request and write their response."""
        response = self._response(prepared, is_chat)
        await self.sleep.ensure_awake()
        transport = request.transport
        abort = transport.abort if transport is not None else lambda: None
        opened = self.open_requests.open(self.worker, prepared, abort)
        if transfer is not None:
            opened.on_first_delta = partial(self.kv_receiver.release, transfer)
        try:
            if prepared.options.stream:
                return await self._stream(request, response, opened, clock)
            return await self._collect(request, response, opened, clock)
        finally:
            self.open_requests.close(self.worker, opened)

    def _response(self, prepared: PreparedRequest, is_chat: bool) -> CompletionResponse:
        options, tool_use = prepared.options, prepared.tool_use
        call_id_chars = tool_use.call_format.call_id_chars if tool_use else 0
        return CompletionResponse(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
            model=prepared.adapter.name if prepared.adapter else self.config.served_name,
            created_s=int(time.time()),
            chat=is_chat,
            include_usage=options.include_usage,
            logprobs=options.params.logprobs is not None,
            vocabulary=self.loaded.vocabulary,
            # OpenAI's form if the model takes any.
            new_call_id=lambda: uuid4().hex[:call_id_chars] or f"call_{uuid4().hex[:24]}",
            choices=[
                ResponseChoice(
                    index,
                    tool_use.parser() if tool_use else None,
                    prepared.reasoning.splitter() if prepared.reasoning else None,
                )
                for index in range(prepared.answers)
            ],
        )

    async def _stream(
        self,
        request: web.Request,
        answer: CompletionResponse,
        opened: OpenRequest,
        clock: RequestClock,
    ) -> web.StreamResponse:
        """Write the answer as server-sent events."""
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                REQUEST_ID: request[REQUEST_ID],
                PROMPT_TOKENS: str(opened.prompt_tokens),
            }
        )
        # The status line waits for the first delta, so that an early failure has its own status.
        delta = await opened.deltas.get()
        _raise_failure(delta)
        clock.record_first(delta)
        response.headers.update(_head_of(request, delta.found, clock))
        await response.prepare(request)
        frames = answer.opening_chunks()
        while True:
            frames.extend(answer.chunks(delta))
            if answer.ended:
                break
            await self._write(response, frames)
            frames = []
            delta = await opened.deltas.get()
            if delta.finish in _FAILURES:
                return await self._end_with_error(response, delta)
        opened.ended = True
        await self._write(response, [*frames, answer.closing_chunks(opened.prompt_tokens)])
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, frames: list[bytes]) -> None:
        if not frames:
            return
        try:
            async with asyncio.timeout(self.config.client_stall_s):
                await response.write(b"".join(frames))
        except TimeoutError as error:
            raise ConnectionResetError("the client does not read") from error

    async def _end_with_error(
        self, response: web.StreamResponse, delta: GenerationDelta
    ) -> web.StreamResponse:
        """End a stream with an error event and without `[DONE]`: the answer is incomplete."""
        is_invalid = delta.finish is FinishReason.INVALID
        code = ErrorCode.INVALID_REQUEST if is_invalid else ErrorCode.INTERNAL
        error = ApiError(code, delta.error)
        await self._write(response, [openai_error_event(error)])
        await response.write_eof()
        return response

    async def _collect(
        self,
        request: web.Request,
        answer: CompletionResponse,
        opened: OpenRequest,
        clock: RequestClock,
    ) -> web.Response:
        """Wait for the complete answer."""
        found = kv_sharing.FoundTokens()
        while not answer.ended:
            delta = await opened.deltas.get()
            _raise_failure(delta)
            clock.record_first(delta)
            answer.collect(delta)
            found = delta.found
        opened.ended = True
        return web.Response(
            body=answer.complete_body(opened.prompt_tokens),
            content_type="application/json",
            headers=_head_of(request, found, clock, is_whole=True),
        )


def _head_of(
    request: web.Request,
    found: kv_sharing.FoundTokens,
    clock: RequestClock,
    *,
    is_whole: bool = False,
) -> dict[str, str]:
    """Return what the head of an answer tells the node."""
    head = {kv_sharing.KV_FOUND: kv_sharing.format_found(found)}
    if TRACEPARENT in request.headers:
        head[ENGINE_TIMES] = format_times(clock.times(is_whole=is_whole))
    return head


def _raise_failure(delta: GenerationDelta) -> None:
    if delta.finish is FinishReason.INVALID:
        raise ApiError(ErrorCode.INVALID_REQUEST, delta.error)
    if delta.finish is FinishReason.ERROR:
        raise ApiError(ErrorCode.INTERNAL, delta.error)
    if delta.finish is FinishReason.LATE:
        raise ApiError(ErrorCode.OUT_OF_CAPACITY, delta.error, retry_after_s=1.0)
