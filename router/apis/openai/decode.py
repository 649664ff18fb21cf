"""Bytes to a checked request, and the body that goes on to the node.

The client's own bytes go on. Only where a stream does not ask for its usage is that one wish set,
for the router needs the count; the frame is then kept from the client.
"""

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from isochrone.wire import codec, headers
from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.openai.prompt import OpenAiRequest, answers
from router.apis.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RequestStreamOptions,
    RerankRequest,
)

R = TypeVar("R")

CHAT: Final = msgspec.json.Decoder(ChatRequest)
COMPLETION: Final = msgspec.json.Decoder(CompletionRequest)
EMBEDDING: Final = msgspec.json.Decoder(EmbeddingRequest)
RERANK: Final = msgspec.json.Decoder(RerankRequest)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT: Final = re.compile(r" - at `\$\.?(.{1,120})`$")
_LACKS: Final = re.compile(r"missing required field `(.{1,60}?)`")
_STATEFUL: Final = frozenset(
    {
        "tools",
        "response_format",
        "logprobs",
        "echo",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
    }
)
_WISH: Final = b'"stream_options":{"include_usage":true}'


def decode(body: bytes, reader: "msgspec.json.Decoder[R]") -> R:
    """Read a request, or raise ApiError 400 naming the field."""
    try:
        return reader.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        text = f"cannot read body: {codec.describe(error)}"
        named = [found.group(1) for found in (_AT.search(text), _LACKS.search(text)) if found]
        raise ApiError(
            ErrorCode.INVALID_REQUEST, text[:400], param=".".join(named) or None
        ) from None


def wants_usage(request: OpenAiRequest) -> bool:
    """Say whether the client asked for a stream and its usage frame."""
    if not request.stream:
        return False
    options = request.stream_options
    return isinstance(options, RequestStreamOptions) and options.include_usage is True


def with_usage_requested(body: bytes, request: OpenAiRequest) -> bytes:
    """Return the body with `stream_options.include_usage` set, all else as the client wrote it."""
    if not request.stream or wants_usage(request):
        return body
    if request.stream_options is UNSET:
        start = body.index(b"{") + 1
        return body[:start] + _WISH + b"," + body[start:]
    fields: dict[str, Any] = _FIELDS.decode(body)
    options = msgspec.json.decode(fields["stream_options"]) or {}
    fields["stream_options"] = {**options, "include_usage": True}
    return msgspec.json.encode(fields)


def drawn(request: OpenAiRequest) -> str:
    """Say how tokens are drawn where every replica would draw the same: greedily, by a seed."""
    if request.frequency_penalty or request.presence_penalty:
        # They count what was said as output; the rest's engine reads it as prompt.
        return ""
    if request.temperature == 0:
        return headers.GREEDY
    return headers.SEEDED if request.seed is not None else ""


def resumption(body: bytes, request: OpenAiRequest) -> Callable[[str, int], bytes | None] | None:
    """Return how to ask for the rest of a stream's answer, None where that cannot be asked for.

    Only plain text can be gone on from: tool calls, a grammar, several choices or log
    probabilities have a state that text does not hold.
    """
    if isinstance(request, EmbeddingRequest | RerankRequest) or answers(request) != 1:
        return None
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        return None

    def rest(text: str, tokens: int) -> bytes | None:
        fields: dict[str, Any] = _FIELDS.decode(body)
        if any(name in fields for name in _STATEFUL):
            return None
        for name in ("max_tokens", "max_completion_tokens"):
            limit = getattr(request, name, None)
            if limit is not None:
                if limit <= tokens:
                    return None
                fields[name] = limit - tokens
        if isinstance(request, CompletionRequest):
            assert isinstance(request.prompt, str)
            fields["prompt"] = request.prompt + text
        elif text:
            said = {"role": "assistant", "content": text}
            messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
            fields["messages"] = [*messages, said]
            # As vLLM and SGLang call it: the last message is not ended, and no new one begun.
            fields["continue_final_message"] = True
            fields["add_generation_prompt"] = False
        fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)

    return rest
