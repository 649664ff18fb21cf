"""The server of an encoder: texts in, embeddings, relevance scores or classes out.

A request is refused before any of its texts is read, or answered completely.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from aiohttp import web

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode, context_length_message
from nodeagent.engine.encoder.encoder_thread import EncoderThread, TokenizedText
from nodeagent.engine.encoder.http_bodies import (
    classify_body,
    classify_decoder,
    embedding_decoder,
    embedding_inputs,
    embeddings_body,
    probabilities,
    rerank_body,
    rerank_decoder,
)
from nodeagent.engine.encoder.loading import LoadedEncoder
from nodeagent.engine.server.http_routes import LONG_TEXT_CHARS, ModelServer
from nodeagent.engine.server.openai.request_body import check_token_ids, decode_body
from nodeagent.engine.server.openai.request_errors import (
    context_length_exceeded,
    invalid_request,
    model_not_found,
)

REQUEST_TOKENS_MAX: Final = 300_000
"""Tokens in all texts of one request; OpenAI's limit."""
TOKENISE_BATCH: Final = 16
"""Texts tokenised between two checks of the limits."""
CHARS_PER_TOKEN_MAX: Final = 64
"""A text with more characters per token of the context is refused without tokenising it: to
tokenise 8 MB takes 20 s."""


class EncoderServer(ModelServer):
    """The HTTP handlers of an encoder, with its step thread."""

    worker: EncoderThread

    def __init__(
        self, config: EngineConfig, loaded: LoadedEncoder, on_death: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.loaded = loaded
        self.kind = loaded.kind
        self.context_tokens = loaded.context_tokens
        self.worker = EncoderThread(loaded.model, config.batch_tokens_max, on_death)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        self.worker.fail_all(message)

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = super().app()
        app.router.add_post("/v1/embeddings", self.embed)
        app.router.add_post("/v1/rerank", self.rerank)
        app.router.add_post("/classify", self.classify)
        return app

    def counts(self) -> dict[str, float]:
        """Return the counts of EngineStats that an encoder has and its step thread lacks."""
        return {
            "running": self.inflight.in_flight,
            "load_s": self.loaded.load_s,
            "weights_bytes": self.loaded.weights_bytes,
            "context_tokens": self.context_tokens,
        }

    async def embed(self, request: web.Request) -> web.Response:
        """Answer `/v1/embeddings`."""
        self._check_kind("embedding")
        body = await self._decoded_body(request, embedding_decoder)
        self._check_model(body.model)
        width = self.loaded.model.shape.hidden
        if body.dimensions is not None and body.dimensions != width:
            raise invalid_request(
                "dimensions",
                f"cannot use field 'dimensions': this model has {width} dimensions, got"
                f" {body.dimensions}",
            )
        texts = await self._tokenise(embedding_inputs(body), "input")
        rows = await self._encode(texts, "input")
        is_base64 = body.encoding_format == "base64"
        tokens = sum(len(text.tokens) for text in texts)
        return _json(embeddings_body(rows, self.config.served_name, tokens, is_base64=is_base64))

    async def rerank(self, request: web.Request) -> web.Response:
        """Answer `/v1/rerank`."""
        self._check_kind("rerank")
        body = await self._decoded_body(request, rerank_decoder)
        self._check_model(body.model)
        documents = [text if isinstance(text, str) else text.text for text in body.documents]
        pairs = [(body.query, document) for document in documents]
        texts = await self._tokenise(pairs, "documents")
        rows = await self._encode(texts, "documents")
        # The logistic function of the model's one logit, between 0 and 1.
        scores = 1 / (1 + np.exp(-np.clip(rows[:, 0], -60, 60)))
        tokens = sum(len(text.tokens) for text in texts)
        return _json(rerank_body(scores, body, self.config.served_name, tokens))

    async def classify(self, request: web.Request) -> web.Response:
        """Answer `/classify`."""
        self._check_kind("classify")
        body = await self._decoded_body(request, classify_decoder)
        self._check_model(body.model)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        texts = await self._tokenise(inputs, "input")
        logits = await self._encode(texts, "input")
        loaded, tokens = self.loaded, sum(len(text.tokens) for text in texts)
        rows = probabilities(logits, is_multi_label=loaded.is_multi_label)
        return _json(classify_body(rows, loaded.labels, self.config.served_name, tokens))

    def _check_kind(self, kind: str) -> None:
        if kind != self.loaded.kind:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use model {self.config.served_name!r} for this request: it is a model of"
                f" kind {self.loaded.kind!r}, not {kind!r}",
                param="model",
            )
        self.check_alive()
        self.inflight.check()

    async def _decoded_body(self, request: web.Request, decoder: Any) -> Any:
        return decode_body(await self.body(request), decoder, self.config.body_bytes_max)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.served_name:
            raise model_not_found(name, repr(self.config.served_name))

    async def _tokenise(self, inputs: list[Any], param: str) -> list[TokenizedText]:
        """Tokenise texts, pairs of texts, or lists of token ids. Raises ApiError above a limit."""
        if isinstance(inputs[0], list):
            return self._tokenise_within_limits(
                inputs, param, lambda batch: [self._framed(tokens, param) for tokens in batch]
            )
        chars = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in inputs]
        longest = max(chars)
        if longest > CHARS_PER_TOKEN_MAX * self.loaded.context_tokens:
            raise context_length_exceeded(
                param,
                context_length_message(
                    self.loaded.context_tokens,
                    f"your {param} {chars.index(longest)} has {longest} characters",
                ),
            )
        tokenise = self.loaded.tokenise
        if sum(chars) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._tokenise_within_limits, inputs, param, tokenise)
        return self._tokenise_within_limits(inputs, param, tokenise)

    def _tokenise_within_limits(
        self, inputs: list[Any], param: str, tokenise: Callable[[list[Any]], list[TokenizedText]]
    ) -> list[TokenizedText]:
        """Tokenise `inputs` a few at a time; stop with ApiError once a limit is exceeded."""
        limit, texts, tokens = self.loaded.context_tokens, list[TokenizedText](), 0
        for start in range(0, len(inputs), TOKENISE_BATCH):
            texts += tokenise(inputs[start : start + TOKENISE_BATCH])
            for number, text in enumerate(texts[start:], start):
                tokens += len(text.tokens)
                if not text.tokens:
                    raise invalid_request(param, f"cannot read {param} {number}: it has no tokens")
                if len(text.tokens) > limit:
                    raise context_length_exceeded(
                        param,
                        context_length_message(
                            limit, f"your {param} {number} resulted in {len(text.tokens)} tokens"
                        ),
                    )
            if tokens > REQUEST_TOKENS_MAX:
                raise invalid_request(
                    param, f"cannot read more than {REQUEST_TOKENS_MAX} tokens in one request"
                )
        return texts

    def _framed(self, tokens: list[int], param: str) -> TokenizedText:
        check_token_ids(param, tokens, self.loaded.model.shape.vocabulary)
        frame = self.loaded.frame
        return TokenizedText([*frame.before, *tokens, *frame.after], [])

    async def _encode(self, texts: list[TokenizedText], param: str) -> np.ndarray:
        """Return the model's output [texts, width].

        Raises ApiError if the output is not finite. Also raises it if the engine has filled up or
        begun to drain since the request arrived: the body took time to arrive and to tokenise.
        """
        self.inflight.acquire()
        try:
            rows = await self.worker.encode(texts)
        finally:
            self.inflight.release()
        is_finite = np.isfinite(rows).all(-1)
        if not is_finite.all():
            raise ApiError(
                ErrorCode.INTERNAL,
                f"cannot answer: the model gave no finite numbers for {param}"
                f" {int(np.argmin(is_finite))}",
            )
        return rows


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
