"""The engine's HTTP: OpenAI bodies in, server-sent events out.

A request that ends, by whichever end, leaves no sequence behind.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from aiohttp import web

from isochrone.wire.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode, openai_error_event
from isochrone.wire.headers import CACHE_SALT, REQUEST_ID
from nodeagent.engine.core.generation_thread import Worker
from nodeagent.engine.core.step import Delta
from nodeagent.engine.distributed.worker_group import Crew
from nodeagent.engine.loading import Loaded
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Finish
from nodeagent.engine.server.adapters import Adapters
from nodeagent.engine.server.generations import Asked, Client, Clients
from nodeagent.engine.server.http_routes import LONG_TEXT_CHARS, Server, as_json
from nodeagent.engine.server.request_body import (
    Ask,
    ChatBody,
    CompletionBody,
    ask_of,
    begun_of,
    hold_to_vocabulary,
    messages_of,
    prediction_of,
    prompts_of,
    read_chat,
    read_completion,
    refused,
    wishes_of,
)
from nodeagent.engine.server.request_headers import said_of, standing_of
from nodeagent.engine.server.response_body import Answer, Choice
from nodeagent.engine.server.tool_calling import Calling
from nodeagent.engine.structured.compiler import Grammars
from nodeagent.engine.tokenizer.chat_template import UnusableChat
from nodeagent.engine.tools.chat_tools import tools_of

_SALT_CHARS_MAX: Final = 256


class EngineServer(Server):
    """The handlers, with what they need."""

    def __init__(
        self, config: EngineConfig, crew: Crew, loaded: Loaded, on_death: Callable[[], None]
    ) -> None:
        super().__init__(config)
        engine, vocabulary = loaded.engine, loaded.vocabulary
        self.loaded = loaded
        self.context_tokens = min(loaded.context_tokens, engine.batching.tokens_max)
        self.clients = Clients(
            vocabulary, self.entrance, config.client_queue_max, engine.speculation
        )
        self.worker: Worker = Worker(engine, self.clients.publish, on_death)
        for member in crew.members:
            asyncio.get_running_loop().add_reader(member.descriptor, self.worker.fail)
        self.adapters = Adapters(config, loaded.adding, loaded.dtype)
        self.grammars = Grammars(vocabulary)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        self.clients.fail_all(message)

    def close(self) -> None:
        """Leave what the device remembers to the next process. After the last step."""
        self.loaded.engine.close()

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = super().app()
        app.on_cleanup.append(self._close_grammars)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/load_lora_adapter", self.load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        return app

    def counts(self) -> Mapping[str, float]:
        """Return counts and rates by name: EngineStats, and what only this engine has."""
        mover, speculation = self.loaded.engine.mover, self.loaded.engine.speculation
        return {
            "block_tokens": BLOCK_TOKENS,
            "open": self.entrance.open,
            "clients_cut_total": self.clients.cut_total,
            "load_s": self.loaded.load_s,
            "weights_bytes": self.loaded.weights_bytes,
            "context_tokens": self.context_tokens,
            **(mover.counts() if mover is not None else {}),
            **(speculation.counts() if speculation is not None else {}),
            "adapters": len(self.adapters.names),
            "adapters_kept": self.adapters.kept,
            "adapter_reads_total": self.adapters.reads_total,
        }

    @property
    def other_names(self) -> Sequence[str]:
        """The adapters' names."""
        return self.adapters.names

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Make an adapter known, so that requests may name it as their model."""
        return as_json({"loaded": await self.adapters.load(await self.body(request))})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        """Forget an adapter; what runs with it goes on."""
        return as_json(
            {"unloaded": self.adapters.unload(await self.body(request, gives_back=True))}
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat."""
        self.entrance.admit()
        body = read_chat(await self.body(request), self.config.body_bytes_max)
        self._hold_to_seats(body, 1)
        template = self.loaded.template
        if template is None:
            raise refused("messages", "cannot chat: this model has no chat template")
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        try:
            told = tools.told if tools else ()
            text = template.render(messages_of(body), told, wishes_of(body))
        except UnusableChat as error:
            raise refused("messages", str(error)) from error
        tokens = await self._tokenise(text, "messages", special=False)
        begun = template.as_text(begun_of(body))
        tokens += await self._tokenise(begun, "messages", special=False)
        calling = Calling.of(tools, template, self.loaded.vocabulary)
        predicted = await self._tokenise(prediction_of(body), "prediction", special=False)
        return await self._generate(request, body, [tokens], calling, predicted)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a plain completion."""
        self.entrance.admit()
        body = read_completion(await self.body(request), self.config.body_bytes_max)
        given = prompts_of(body)
        self._hold_to_seats(body, len(given))
        prompts = [
            await self._tokenise(prompt, "prompt", special=True)
            if isinstance(prompt, str)
            else prompt
            for prompt in given
        ]
        return await self._generate(request, body, prompts)

    def _hold_to_seats(self, body: ChatBody | CompletionBody, prompts: int) -> None:
        """Refuse more answers at once than can ever run beside each other."""
        answers, limit = prompts * (body.n or 1), self.config.sequences_max
        if answers > limit:
            raise refused(
                "n" if (body.n or 1) > 1 else "prompt",
                f"cannot give {answers} answers to one request: this engine runs {limit} at once",
            )

    async def _close_grammars(self, app: web.Application) -> None:
        self.grammars.close()

    async def _tokenise(self, text: str, param: str, *, special: bool) -> list[int]:
        encode = self.loaded.vocabulary.encode
        least = self.loaded.vocabulary.tokens_least(text)
        if least > self.context_tokens:
            # Tokenising megabytes takes seconds and gigabytes; the answer is known before.
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"cannot serve {len(text)} characters of {param}: they take {least} tokens or"
                f" more, the limit is {self.context_tokens} tokens",
                param=param,
            )
        try:
            if len(text) > LONG_TEXT_CHARS:
                return await asyncio.to_thread(encode, text, special=special)
            return encode(text, special=special)
        except UnicodeEncodeError as error:
            raise refused(param, "cannot tokenise: the text holds half a surrogate") from error

    async def _generate(
        self,
        request: web.Request,
        body: ChatBody | CompletionBody,
        prompts: list[list[int]],
        calling: Calling | None = None,
        predicted: Sequence[int] = (),
    ) -> web.StreamResponse:
        asked = await self._asked(request, body, prompts, calling, predicted)
        ask, chat = asked.ask, isinstance(body, ChatBody)
        answer = Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=asked.adapter.name if asked.adapter else self.config.served_name,
            created_s=int(time.time()),
            chat=chat,
            include_usage=ask.include_usage,
            logprobs=ask.params.logprobs is not None,
            vocabulary=self.loaded.vocabulary,
            new_call_id=lambda: _call_id(calling.how.call_id_chars if calling else 0),
            choices=[
                Choice(index, calling.reader() if calling else None)
                for index in range(asked.answers)
            ],
        )
        transport = request.transport
        abort = transport.abort if transport is not None else lambda: None
        client = self.clients.open(self.worker, asked, abort)
        try:
            if ask.stream:
                return await self._stream(request, answer, client)
            return await self._collect(answer, client)
        finally:
            self.clients.close(self.worker, client)

    async def _asked(
        self,
        request: web.Request,
        body: ChatBody | CompletionBody,
        prompts: list[list[int]],
        calling: Calling | None,
        predicted: Sequence[int],
    ) -> Asked:
        """Check the request against this model, and bring together all that it takes."""
        adapter = await self.adapters.hold(body.model)
        ask = ask_of(body)
        ask = replace(ask, params=replace(ask.params, drawn_before=said_of(request.headers)))
        if calling is not None:
            ask = replace(ask, grammar=calling.grammar(ask.grammar))
        ended = [(tokens, self._ending(body, ask, tokens)) for tokens in prompts]
        salt = request.headers.get(CACHE_SALT, "")
        if len(salt) > _SALT_CHARS_MAX:
            raise refused(CACHE_SALT, f"cannot use a salt of {len(salt)} characters")
        return Asked(
            ask,
            ended,
            salt=salt.encode(errors="surrogateescape"),
            constraint=await self.grammars.compile(ask.grammar) if ask.grammar else None,
            shown=calling.shown if calling else None,
            adapter=adapter,
            standing=standing_of(request.headers, salt, time.monotonic()),
            predicted=predicted,
            goes_on=not isinstance(body, ChatBody) or bool(body.continue_final_message),
        )

    def _ending(self, body: ChatBody | CompletionBody, ask: Ask, tokens: list[int]) -> Ending:
        """Check the request against this model and return what ends it."""
        self.hold_alive()
        size = self.loaded.vocabulary.size
        biased = [token for token, _ in ask.params.logit_bias]
        hold_to_vocabulary("prompt", tokens, size)
        hold_to_vocabulary("logit_bias", biased, size)
        if not tokens:
            raise refused("prompt", "cannot complete an empty prompt")
        limit = self.context_tokens
        max_tokens = ask.max_tokens or max(limit - len(tokens), 1)
        if len(tokens) + max_tokens > limit:
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"cannot serve {len(tokens)} prompt tokens and max_tokens {max_tokens}: together"
                f" they exceed the limit of {limit} tokens",
                param="messages" if isinstance(body, ChatBody) else "prompt",
            )
        least = ask.params.min_tokens - ask.params.drawn_before
        if least > max_tokens or (least > 0 and ask.grammar is not None):
            over = f"max_tokens {max_tokens}" if ask.grammar is None else "a form of the output"
            raise refused("min_tokens", f"cannot obey both min_tokens {least} and {over}")
        # A grammar that is fulfilled allows nothing but the end.
        endless = ask.ignore_eos and ask.grammar is None
        own = frozenset() if endless else self.loaded.vocabulary.stop_ids
        return Ending(max_tokens, own | ask.stop_ids)

    async def _stream(
        self, request: web.Request, answer: Answer, client: Client
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                REQUEST_ID: request[REQUEST_ID],
            }
        )
        # The first delta is awaited before the status line: an early failure is a plain error.
        delta = await client.deltas.get()
        _raise_failure(delta)
        await response.prepare(request)
        frames = answer.opening()
        while True:
            frames.extend(answer.chunks(delta))
            if answer.ended:
                break
            await self._write(response, frames)
            frames = []
            delta = await client.deltas.get()
            if delta.finish in (Finish.ERROR, Finish.LATE):
                return await self._break_off(response, delta)
        client.ended = True
        await self._write(response, [*frames, answer.closing(client.prompt_tokens)])
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

    async def _break_off(self, response: web.StreamResponse, delta: Delta) -> web.StreamResponse:
        """Tell an error inside a stream; without the end mark, so that no one takes it as whole."""
        error = ApiError(ErrorCode.INTERNAL, delta.error)
        await self._write(response, [openai_error_event(error)])
        await response.write_eof()
        return response

    async def _collect(self, answer: Answer, client: Client) -> web.Response:
        while not answer.ended:
            delta = await client.deltas.get()
            _raise_failure(delta)
            answer.collect(delta)
        client.ended = True
        return web.Response(
            body=answer.whole(client.prompt_tokens), content_type="application/json"
        )


def _call_id(chars: int) -> str:
    return uuid.uuid4().hex[:chars] if chars else f"call_{uuid.uuid4().hex[:24]}"


def _raise_failure(delta: Delta) -> None:
    if delta.finish is Finish.ERROR:
        raise ApiError(ErrorCode.INTERNAL, delta.error)
    if delta.finish is Finish.LATE:
        raise ApiError(ErrorCode.OUT_OF_CAPACITY, delta.error, retry_after_s=1.0)
