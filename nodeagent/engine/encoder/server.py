"""The HTTP of an engine that reads: texts in, vectors or scores out.

A request is refused whole before any of it is read, or answered whole.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from aiohttp import web

from isochrone.wire.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.encoder.bodies import (
    documents_of,
    embedding_decoder,
    embeddings_answer,
    inputs_of,
    rerank_answer,
    rerank_decoder,
)
from nodeagent.engine.encoder.loading import LoadedEncoder
from nodeagent.engine.encoder.worker import EncoderWorker, Text
from nodeagent.engine.server.http_routes import LONG_TEXT_CHARS, Server
from nodeagent.engine.server.request_body import decoded, hold_to_vocabulary, refused, unknown_model

REQUEST_TOKENS_MAX: Final = 300_000
"""Tokens in all the texts of one request, as OpenAI has it."""
TOKENISED_AT_ONCE: Final = 16
CHARS_PER_TOKEN_MAX: Final = 64
"""Longer texts are refused by their length: to tokenise 8 MB takes 20 s."""


class EncoderServer(Server):
    """The handlers, with what they need."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedEncoder, on_death: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.loaded = loaded
        self.kind = loaded.kind
        self.context_tokens = loaded.context_tokens
        self.worker: EncoderWorker = EncoderWorker(loaded.model, config.batch_tokens_max, on_death)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        self.worker.fail_all(message)

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = super().app()
        app.router.add_post("/v1/embeddings", self.embed)
        app.router.add_post("/v1/rerank", self.rerank)
        return app

    def counts(self) -> dict[str, float]:
        """Return counts and rates by name: those of EngineStats that mean something here."""
        return {
            "running": self.entrance.open,
            "load_s": self.loaded.load_s,
            "weights_bytes": self.loaded.weights_bytes,
            "context_tokens": self.context_tokens,
        }

    async def embed(self, request: web.Request) -> web.Response:
        """Answer `/v1/embeddings`."""
        self._admit("embedding")
        body = await self._decoded(request, embedding_decoder)
        self._hold_to_model(body.model)
        width = self.loaded.model.shape.hidden
        if body.dimensions is not None and body.dimensions != width:
            raise refused(
                "dimensions",
                f"cannot embed in {body.dimensions} dimensions: this model has {width}, no others",
            )
        inputs = inputs_of(body)
        texts = await self._texts(inputs, "input")
        rows = await self._read(texts, "input")
        packed = body.encoding_format == "base64"
        tokens = sum(len(text.tokens) for text in texts)
        return _answer(embeddings_answer(rows, self.config.served_name, tokens, packed=packed))

    async def rerank(self, request: web.Request) -> web.Response:
        """Answer `/v1/rerank`."""
        self._admit("rerank")
        body = await self._decoded(request, rerank_decoder)
        self._hold_to_model(body.model)
        pairs = [(body.query, document) for document in documents_of(body)]
        texts = await self._texts(pairs, "documents")
        rows = await self._read(texts, "documents")
        # One label: its logit, as a share between nought and one.
        scores = 1 / (1 + np.exp(-np.clip(rows[:, 0], -60, 60)))
        tokens = sum(len(text.tokens) for text in texts)
        return _answer(rerank_answer(scores, body, self.config.served_name, tokens))

    def _admit(self, kind: str) -> None:
        if kind != self.loaded.kind:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use {self.config.served_name!r} so: it is a model of kind"
                f" {self.loaded.kind!r}, not {kind!r}",
                param="model",
            )
        self.hold_alive()
        self.entrance.admit()

    async def _decoded(self, request: web.Request, decoder: Any) -> Any:
        return decoded(await self.body(request), decoder, self.config.body_bytes_max)

    def _hold_to_model(self, name: str | None) -> None:
        if name is not None and name != self.config.served_name:
            raise unknown_model(name, repr(self.config.served_name))

    async def _texts(self, given: list[Any], param: str) -> list[Text]:
        """Tokenise texts, pairs of texts, or lists of token ids, and hold them to the limits."""
        if isinstance(given[0], list):
            return self._held(given, param, lambda part: [self._framed(one, param) for one in part])
        chars = [len(one) if isinstance(one, str) else sum(map(len, one)) for one in given]
        longest = max(chars)
        if longest > CHARS_PER_TOKEN_MAX * self.loaded.context_tokens:
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"cannot read {param} {chars.index(longest)}: it has {longest} characters, and the"
                f" limit is {self.loaded.context_tokens} tokens",
                param=param,
            )
        if sum(chars) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._held, given, param, self.loaded.tokenise)
        return self._held(given, param, self.loaded.tokenise)

    def _held(
        self, given: list[Any], param: str, tokenise: Callable[[list[Any]], list[Text]]
    ) -> list[Text]:
        """Tokenise `given` a few at a time, and no more of them where one is beyond a limit."""
        limit, texts, tokens = self.loaded.context_tokens, list[Text](), 0
        for at in range(0, len(given), TOKENISED_AT_ONCE):
            texts += tokenise(given[at : at + TOKENISED_AT_ONCE])
            for number, text in enumerate(texts[at:], at):
                tokens += len(text.tokens)
                if not text.tokens:
                    raise refused(param, f"cannot read {param} {number}: it has no tokens")
                if len(text.tokens) > limit:
                    raise ApiError(
                        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                        f"cannot read {param} {number}: it takes {len(text.tokens)} tokens, the"
                        f" limit is {limit}",
                        param=param,
                    )
            if tokens > REQUEST_TOKENS_MAX:
                raise refused(param, f"cannot read more than {REQUEST_TOKENS_MAX} tokens at once")
        return texts

    def _framed(self, tokens: list[int], param: str) -> Text:
        hold_to_vocabulary(param, tokens, self.loaded.model.shape.vocabulary)
        before, after = self.loaded.frame
        return Text([*before, *tokens, *after], [])

    async def _read(self, texts: list[Text], param: str) -> np.ndarray:
        self.entrance.enter()
        try:
            rows = await self.worker.encode(texts)
        finally:
            self.entrance.leave()
        sound = np.isfinite(rows).all(-1)
        if not sound.all():
            raise ApiError(
                ErrorCode.INTERNAL,
                f"cannot answer: the model gave no finite numbers for {param}"
                f" {int(np.argmin(sound))}",
            )
        return rows


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
