"""Decodes OpenAI request bodies, and rewrites them where the node needs another body.

The node gets the client's own bytes, but for a few fields. A stream whose client does not ask for
the usage frame is changed to ask for it, because the router needs the count; the frame is then not
sent to the client.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.http.invalid_field import invalid_field
from isochrone.wire.http.json_body import UnsafeJson, check_json_body
from isochrone.wire.kv.kv_transfer import ENGINE_FIELDS, NESTED_FIELDS
from router.apis.chat_messages import SYSTEM_ROLES, system_first
from router.apis.openai.prompt import OpenAiRequest, count_answers
from router.apis.openai.schema import (
    ABSENT,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    LinkedChat,
    RequestStreamOptions,
    RerankRequest,
)
from router.inference_request import NOTHING_LEFT

R = TypeVar("R")

CHAT: Final = msgspec.json.Decoder(ChatRequest)
LINKED_CHAT: Final = msgspec.json.Decoder(LinkedChat)
COMPLETION: Final = msgspec.json.Decoder(CompletionRequest)
EMBEDDING: Final = msgspec.json.Decoder(EmbeddingRequest)
CLASSIFY: Final = msgspec.json.Decoder(ClassifyRequest)
RERANK: Final = msgspec.json.Decoder(RerankRequest)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_CONTENT: Final = msgspec.json.Decoder(str | list[msgspec.Raw] | None)
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
        *("grammar", "json_schema", "regex", "ebnf"),  # of llama.cpp and SGLang
    }
)
"""Options that give a generation a state which its text alone does not hold."""

# Names of this module are looked up once.
_ABSENT: Final = ABSENT
_ENGINE_FIELDS: Final = ENGINE_FIELDS

_INCLUDE_USAGE: Final = b'"stream_options":{"include_usage":true}'


def decode(body: bytes, decoder: "msgspec.json.Decoder[R]") -> R:
    """Decode a request body. Raises ApiError 400 whose `param` names the invalid field."""
    check_body(body)
    return decode_checked(body, decoder)


def check_body(body: bytes) -> None:
    """Raise ApiError 400 for a body that parsers may read differently."""
    try:
        check_json_body(body)
    except UnsafeJson as unsafe:
        raise invalid_field(str(unsafe)) from None


def decode_checked(body: bytes, decoder: "msgspec.json.Decoder[R]") -> R:
    """Decode a body that `check_body` accepts. Raises ApiError 400."""
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise invalid_field(codec.describe(error), decoder.type, body) from None


@contextmanager
def named_as(messages_field: str) -> Iterator[None]:
    """Let errors about a chat's messages name the field that the client's API has for them.

    Places within the messages are left out: they are not those of the client's field.
    """
    try:
        yield
    except ApiError as error:
        if error.param is None or not error.param.startswith("messages"):
            raise
        raise ApiError(
            error.code,
            error.message.replace(f"field '{error.param}'", f"field '{messages_field}'"),
            param=messages_field,
            headers=error.headers,
        ) from None


def refuse_storing(store: bool | None) -> None:
    """Raise ApiError 400 if the client requires that the router stores the answer."""
    if store:
        message = "cannot use field 'store': answers are not stored, send false or leave it out"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param="store")


def wants_usage(request: OpenAiRequest) -> bool:
    """Return whether the client requested a stream with the usage frame."""
    if not request.stream:
        return False
    options = request.stream_options
    return isinstance(options, RequestStreamOptions) and options.include_usage is True


def with_usage_requested(body: bytes, request: OpenAiRequest) -> bytes:
    """Return the body with `stream_options.include_usage` set, otherwise unchanged."""
    if not request.stream or wants_usage(request):
        return body
    if request.stream_options is UNSET:
        start = body.index(b"{") + 1
        return body[:start] + _INCLUDE_USAGE + b"," + body[start:]
    fields: dict[str, Any] = _FIELDS.decode(body)
    options = _FIELDS.decode(fields["stream_options"]) if request.stream_options else {}
    fields["stream_options"] = {**options, "include_usage": True}
    return msgspec.json.encode(fields)


def with_model(body: bytes, model: str) -> bytes:
    """Return the body with another `model`."""
    return msgspec.json.encode({**_FIELDS.decode(body), "model": model})


def with_system_first(body: bytes, request: ChatRequest) -> bytes:
    """Return the body with its first instructions in one system message, otherwise unchanged.

    Later messages of the system stay where the client has put them: many templates take them.
    """
    roles = [message.role for message in request.messages]
    if "developer" not in roles and roles[:2] != ["system", "system"]:
        return body
    fields: dict[str, Any] = _FIELDS.decode(body)
    messages: list[dict[str, Any]] = []
    for given, read in zip(_MESSAGES.decode(fields["messages"]), request.messages, strict=True):
        message: dict[str, Any] = {**given, "role": read.role}
        if read.role in SYSTEM_ROLES:
            message["content"] = _CONTENT.decode(given.get("content", b"null")) or ""
        messages.append(message)
    return msgspec.json.encode({**fields, "messages": system_first(messages, "system")})


def without_transfer_fields(body: bytes, request: OpenAiRequest) -> bytes:
    """Return the body without the fields in which engines tell each other where KV is.

    They name hosts to pull from: a client that could set them would have an engine connect to any.
    vLLM also finds them among the entries of NESTED_FIELDS, and answers 500 to a wrong type.
    """
    if not (isinstance(request, ChatRequest) or isinstance(request, CompletionRequest)):  # noqa: SIM101 - a union would be made for each request
        return body
    sent = [name for name in _ENGINE_FIELDS if getattr(request, name) is not _ABSENT]
    nested = bytes(request.vllm_xargs) if request.vllm_xargs is not _ABSENT else b""
    if not sent and not nested.startswith(b"{"):
        return body
    fields: dict[str, Any] = _FIELDS.decode(body)
    if nested.startswith(b"{"):
        entries: dict[str, Any] = _FIELDS.decode(nested)
        fields[NESTED_FIELDS] = {
            name: entries[name] for name in entries if name not in _ENGINE_FIELDS
        }
    return msgspec.json.encode({name: fields[name] for name in fields if name not in sent})


def determinism_of(request: OpenAiRequest) -> str:
    """Return GREEDY or SEEDED if all replicas would generate the same tokens, else empty."""
    if request.frequency_penalty or request.presence_penalty:
        # Penalties count output tokens; the replica that resumes reads them as prompt.
        return ""
    if request.temperature == 0:
        return headers.GREEDY
    return headers.SEEDED if request.seed is not None else ""


def _has_state(value: msgspec.Raw) -> bool:
    """Return whether an option of `_STATEFUL` has a value that asks for something."""
    option = msgspec.json.decode(value)
    return not (option is None or option is False or option in ([], {"type": "text"}))


def resume_body_builder(
    request: OpenAiRequest,
) -> Callable[[bytes, str, int], bytes | None] | None:
    """Return a function that builds the body for the rest of a stream.

    The function takes the body, the generated text and its number of tokens. The result, or that of
    the function, is None if the request cannot be resumed. Only plain text can: tool calls,
    grammars, several answers and log probabilities have a state that text does not hold. The
    function's result is NOTHING_LEFT if the text has all tokens that it may have.
    """
    if isinstance(request, EmbeddingRequest | RerankRequest) or count_answers(request) != 1:
        return None
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        return None

    def build(body: bytes, text: str, tokens: int) -> bytes | None:
        fields: dict[str, Any] = _FIELDS.decode(body)
        if any(_has_state(fields[name]) for name in fields.keys() & _STATEFUL):
            return None
        for name in ("max_tokens", "max_completion_tokens"):
            limit = getattr(request, name, None)
            if limit is not None:
                if limit <= tokens:
                    return NOTHING_LEFT
                fields[name] = limit - tokens
        least = msgspec.json.decode(fields.get("min_tokens", b"null"))
        if isinstance(least, int):
            # Engines refuse more than the limit above, and do not count what another has generated.
            fields["min_tokens"] = max(0, least - tokens)
        if isinstance(request, CompletionRequest):
            assert isinstance(request.prompt, str)
            fields["prompt"] = request.prompt + text
        elif text:
            messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
            partial: dict[str, Any] = {"role": "assistant", "content": ""}
            if bytes(fields.get("continue_final_message", b"")) == b"true":
                # The client began the answer itself: the last message holds its beginning.
                partial = msgspec.json.decode(messages.pop())
                if not isinstance(partial.get("content"), str):
                    return None
            partial["content"] += text
            fields["messages"] = [*messages, partial]
            # Options of vLLM and SGLang: leave the last message open, and begin no new one.
            fields["continue_final_message"] = True
            fields["add_generation_prompt"] = False
        options = fields.get("stream_options")
        kept = (msgspec.json.decode(options) if options else None) or {}
        fields["stream_options"] = {**kept, "include_usage": True}
        return msgspec.json.encode(fields)

    return build
