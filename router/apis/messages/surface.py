"""`POST /v1/messages` and its token counts: translated to engine requests, and back."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.messages.errors import translate_refusal
from router.apis.messages.events import MessageEvents
from router.apis.messages.schema import (
    COUNT_TOKENS_PATH,
    COUNT_TOKENS_REQUEST,
    MESSAGES_PATH,
    MESSAGES_REQUEST,
    ThinkingAdaptive,
    ThinkingEnabled,
)
from router.apis.messages.translate import to_chat, to_tokenize
from router.apis.openai.decode import decode
from router.apis.openai.surface import OpenAiSurface
from router.apis.translating_writer import TranslatingWriter, read_token_count
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

MESSAGES_PATHS: Final = frozenset({MESSAGES_PATH, COUNT_TOKENS_PATH})
MESSAGES_REQUEST_ID: Final = "request-id"
"""Anthropic's name of the header with the request's id, which its clients show in errors."""

REFUSED_HEADERS: Final = {
    b"anthropic-workspace-id": "a key belongs to one tenant, which has no workspaces",
    b"anthropic-user-profile-id": "there are no user profiles",
}
"""Parameters of Anthropic's SDKs that they send as headers, and that change nothing here."""


class OutputDoesNotFit(ApiError):
    """The prompt and `max_tokens` are longer than the context; the prompt alone may fit."""


def is_messages(path: str) -> bool:
    """Return whether a path belongs to this surface."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def read_messages_request(
    openai: OpenAiSurface,
    request: HttpRequest,
    path: str,
    writer: ResponseWriter,
    *,
    fills_context: bool = False,
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return the inference request, and a writer that translates its response.

    With `fills_context`, or if `max_tokens` alone does not fit into the context, the answer may be
    as long as the context allows. Otherwise the writer raises OutputDoesNotFit if the engine says
    that prompt and `max_tokens` are too long. Raises ApiError if the request is invalid.
    """
    for name, reason in REFUSED_HEADERS.items():
        if name in request.headers:
            message = f"cannot use the header '{name.decode()}': {reason}"
            raise ApiError(ErrorCode.INVALID_REQUEST, message)
    if path == COUNT_TOKENS_PATH:
        return _read_count_request(openai, request, writer)
    given = decode(request.body, MESSAGES_REQUEST)
    assert request.key is not None
    context_tokens = openai.base_deployment(given.model, request.key).context_tokens
    fills_context = fills_context or given.max_tokens >= context_tokens
    thinking = given.thinking
    events = MessageEvents(
        f"msg_{request.request_id}",
        given.model,
        omits_thinking=isinstance(thinking, ThinkingEnabled | ThinkingAdaptive)
        and thinking.display == "omitted",
        fills_context=fills_context,
    )
    chat = to_chat(given, fills_context=fills_context, may_link=openai.may_link)
    inference = openai.read_translated(request, chat, events.failed, "messages")
    inference.on_prompt_tokens = events.take_prompt_tokens
    refuse = partial(translate_refusal, request_id=request.client_request_id)
    translating = TranslatingWriter(
        writer,
        translate_frame=events.translate_frame,
        translate_body=events.translate_body,
        translate_refusal=refuse if fills_context else partial(_refuse_or_fill, refuse),
        header_lines=_request_id_line(request),
    )
    return inference, translating


def _refuse_or_fill(refuse: Callable[[bytes], bytes], body: bytes) -> bytes:
    """Translate a replica's refusal; raise OutputDoesNotFit if the limit of output may be why."""
    error: Any = msgspec.json.decode(body)["error"]
    if isinstance(error, dict) and error.get("code") == ErrorCode.CONTEXT_LENGTH_EXCEEDED.value:
        raise OutputDoesNotFit(ErrorCode.CONTEXT_LENGTH_EXCEEDED, str(error.get("message")))
    return refuse(body)


def _read_count_request(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    given = decode(request.body, COUNT_TOKENS_REQUEST)
    translating = TranslatingWriter(
        writer,
        translate_frame=bytes,
        translate_body=translate_count,
        translate_refusal=partial(translate_refusal, request_id=request.client_request_id),
        header_lines=_request_id_line(request),
    )
    chat = to_tokenize(given, may_link=openai.may_link)
    return openai.read_count(request, chat, "messages"), translating


def translate_count(body: bytes) -> bytes:
    """Translate an engine's count of tokens. Raises ApiError if there is none."""
    return msgspec.json.encode({"input_tokens": read_token_count(body)})


def _request_id_line(request: HttpRequest) -> str:
    return f"{MESSAGES_REQUEST_ID}: {request.client_request_id}\r\n"
