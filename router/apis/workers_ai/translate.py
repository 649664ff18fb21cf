"""Translates between Workers AI's bodies and OpenAI's, which engines understand. Pure.

Field names and frames are those of Cloudflare's REST API reference, "Execute AI model".
"""

import re
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from isochrone.wire.errors import MEANINGS, ApiError, ErrorCode
from isochrone.wire.peers.adapter import ADAPTER_NAME_PATTERN
from router.apis.openai.decode import decode
from router.apis.openai.schema import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    RankableDocument,
    RouterOptions,
)
from router.dataplane import sse
from router.dataplane.chunk import ChunkChoice, ChunkDelta, decode_chunk

ERROR_EVENT: Final = b"event: error\n"
MAX_TOKENS_DEFAULT: Final = 256
"""The limit of Workers AI for requests that set none."""

_COPIED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "max_completion_tokens"),
    *("response_format", "guided_json", "tool_choice", "parallel_tool_calls"),
    *("chat_template_kwargs", "reasoning_effort", "user", "metadata"),
)
"""Fields that are the same in both formats. The replica's engine refuses those it does not have."""

_TRANSLATION_PROMPT: Final = (
    "Translate the user's text{source} into {target}. Answer with the translation alone, and keep"
    " its meaning, its tone and its line breaks."
)
_SUMMARY_PROMPT: Final = (
    "Summarise the user's text in its own language{length}. Answer with the summary alone."
)

_GENERATION_FIELDS: Final = frozenset(_COPIED) | {
    *("prompt", "messages", "raw", "stream", "stream_options", "max_tokens", "tools", "lora"),
    *("model", "options"),
}
FIELDS_OF_TASK: Final = {
    "prompt": _GENERATION_FIELDS,
    "messages": _GENERATION_FIELDS - {"raw"},
    "text": frozenset({"text", "model", "options"}),
    "target_lang": frozenset(
        {"text", "target_lang", "source_lang", "max_tokens", "model", "options"}
    ),
    "input_text": frozenset({"input_text", "max_length", "max_tokens", "model", "options"}),
    "query": frozenset({"query", "contexts", "top_k", "model", "options"}),
}
"""The fields that are honoured, by the field that decides the task."""

_DECIDING_FIELDS: Final = (
    "'prompt', 'messages', 'input', 'text', 'query', 'target_lang' (with 'text') and 'input_text'"
)


class RunResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`: the format of the generated text."""

    type: str = "text"
    json_schema: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class RunRequest(msgspec.Struct, frozen=True):
    """`/ai/run`: a prompt, messages, texts to embed, or a query with texts to rank.

    A chat model also translates `text` into `target_lang` and summarises `input_text`. Fields of
    `_COPIED` are copied to the OpenAI request, all others are refused.
    """

    model: str | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: list[msgspec.Raw] | None = None
    text: str | Annotated[list[str], Meta(min_length=1, max_length=2048)] | None = None
    query: Annotated[str, Meta(min_length=1)] | None = None
    contexts: Annotated[list[RankableDocument], Meta(min_length=1, max_length=1024)] | None = None
    top_k: int | None = None
    target_lang: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    source_lang: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    input_text: Annotated[str, Meta(min_length=1)] | None = None
    max_length: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    response_format: RunResponseFormat | None = None
    lora: str | None = None
    stream: bool = False
    raw: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    options: RouterOptions | None = None


class OpenAiCall(NamedTuple):
    """The OpenAI path and body of a translated request.

    `is_json` if the answer is a JSON value. `text_field` names the only field of the result, if the
    task has one of its own.
    """

    path: str
    body: bytes
    is_json: bool = False
    text_field: str = ""


class _Embedded(msgspec.Struct, frozen=True):
    embedding: msgspec.Raw


class _ResponsesShape(msgspec.Struct, frozen=True):
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: str | None = None


_ADAPTER_NAME: Final = re.compile(ADAPTER_NAME_PATTERN)
_NAMED_BY: Final = frozenset({"name", "schema"})
_NAMED_KEYS: Final = _NAMED_BY | {"description", "strict"}
"""The keys of a schema in OpenAI's form, which has at least one of `_NAMED_BY`."""
_FLAGS: Final = frozenset({"raw", "stream"})
_RESPONSES_SHAPE: Final = msgspec.json.Decoder(_ResponsesShape)
_RUN: Final = msgspec.json.Decoder(RunRequest)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_EMBEDDED: Final = msgspec.json.Decoder(list[_Embedded])


def to_openai(body: bytes, model: str) -> OpenAiCall:
    """Return the equivalent OpenAI request. Raises ApiError 400."""
    run = decode(body, _RUN)
    sent = {
        name: value
        for name, value in _FIELDS.decode(body).items()
        # Clients send these defaults whatever the task is.
        if bytes(value) != b"null" and not (name in _FLAGS and bytes(value) == b"false")
    }
    _check(run, sent, model)
    options = {"options": run.options} if run.options is not None else {}
    if run.target_lang is not None or run.input_text is not None:
        return _to_instructed_chat(run, model, options)
    if run.text is not None:
        embedding = {"model": model, "input": run.text, **options}
        return OpenAiCall(EMBEDDINGS_PATH, msgspec.json.encode(embedding))
    if run.query is not None:
        reranking: dict[str, Any] = {
            "model": model,
            "query": run.query,
            "documents": run.contexts,
            **options,
        }
        if run.top_k is not None:
            reranking["top_n"] = run.top_k
        return OpenAiCall(RERANK_PATH, msgspec.json.encode(reranking))
    fields: dict[str, Any] = {name: sent[name] for name in _COPIED if name in sent}
    fields |= {"model": f"{model}:{run.lora}" if run.lora else model, **options}
    if run.max_tokens is not None or "max_completion_tokens" not in sent:
        fields["max_tokens"] = run.max_tokens or MAX_TOKENS_DEFAULT
    if run.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if run.tools:
        # Workers AI allows OpenAI's envelope to be omitted.
        fields["tools"] = [
            tool if "function" in tool else {"type": "function", "function": tool}
            for tool in run.tools
        ]
    is_json = run.response_format is not None and run.response_format.type != "text"
    if run.response_format is not None and run.response_format.type == "json_schema":
        fields["response_format"] = _openai_format(run.response_format.json_schema)
    if run.raw and run.prompt is not None:
        completion = msgspec.json.encode({**fields, "prompt": run.prompt})
        return OpenAiCall(COMPLETIONS_PATH, completion, is_json)
    prompt_message = [{"role": "user", "content": run.prompt}]
    chat = msgspec.json.encode({**fields, "messages": run.messages or prompt_message})
    return OpenAiCall(CHAT_PATH, chat, is_json)


def _openai_format(schema: msgspec.Raw | msgspec.UnsetType) -> dict[str, Any]:
    """Return the format of an answer by a schema; without one, which is allowed here, any object.

    Workers AI's schemas have no name; engines need OpenAI's form. JSON Schema has neither keyword
    of `_NAMED_BY`, so that form cannot be mistaken for a schema.
    """
    if schema is msgspec.UNSET or bytes(schema) == b"null":
        return {"type": "json_object"}
    try:
        keys = frozenset(_FIELDS.decode(schema))
    except msgspec.DecodeError:
        # The engine says what is wrong.
        keys = _NAMED_BY
    named = (
        schema if keys <= _NAMED_KEYS and keys & _NAMED_BY else {"name": "answer", "schema": schema}
    )
    return {"type": "json_schema", "json_schema": named}


def _to_instructed_chat(run: RunRequest, model: str, options: dict[str, Any]) -> OpenAiCall:
    """Return a translation or a summary as a request to a chat model."""
    if run.target_lang is not None:
        source = f" from {run.source_lang}" if run.source_lang else ""
        instruction = _TRANSLATION_PROMPT.format(source=source, target=run.target_lang)
        text, text_field = run.text, "translated_text"
    else:
        length = f" in at most {run.max_length} words" if run.max_length else ""
        instruction = _SUMMARY_PROMPT.format(length=length)
        text, text_field = run.input_text, "summary"
    messages = [
        {"role": "system", "content": instruction},
        {"role": "user", "content": text},
    ]
    chat = {"model": model, "messages": messages, "temperature": 0, **options}
    if run.max_tokens is not None:
        chat["max_tokens"] = run.max_tokens
    return OpenAiCall(CHAT_PATH, msgspec.json.encode(chat), text_field=text_field)


FIELDS_OF_QUEUE: Final = frozenset({"requests", "request_id"})
"""The fields of `?queueRequest=true`, which names another kind of body."""


def _check(run: RunRequest, sent: dict[str, msgspec.Raw], model: str) -> None:
    """Raise ApiError 400 if a request has no single task, or uses what is not supported."""
    deciding = [name for name in FIELDS_OF_TASK if name in sent]
    if deciding == ["text", "target_lang"]:
        deciding.remove("text")
    if len(deciding) != 1:
        quoted = " and ".join(f"'{name}'" for name in deciding)
        found = f"it has {quoted}" if deciding else "it has none"
        if not deciding and not sent.keys().isdisjoint(FIELDS_OF_QUEUE):
            found += "; for queued runs add ?queueRequest=true to the URL"
        reason = f"it needs exactly one of {_DECIDING_FIELDS}; {found}"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use the request body: {reason}")
    unsupported = sorted(sent.keys() - FIELDS_OF_TASK[deciding[0]])
    if unsupported:
        name = unsupported[0][:60]
        reason = f"/ai/run does not support it together with '{deciding[0]}'"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field '{name}': {reason}")
    check_model(run.model, model)
    if run.target_lang is not None and not isinstance(run.text, str):
        reason = "it needs field 'text' with one text to translate"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field 'target_lang': {reason}")
    if run.query is not None and run.contexts is None:
        reason = "it needs field 'contexts' with the texts to rank"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field 'query': {reason}")
    if run.lora and not _ADAPTER_NAME.match(run.lora):
        reason = "it is neither the id nor the name of an adapter"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field 'lora': {reason}")


def translate_body(body: bytes, *, is_json: bool, text_field: str = "") -> bytes:
    """Translate a complete OpenAI response; `text_field` names the field of its text alone."""
    result = result_of(body, is_json=is_json)
    if text_field:
        result = {text_field: str(result["response"]).strip()}
    return in_envelope(msgspec.json.encode(result))


def in_envelope(result: bytes) -> bytes:
    """Return a JSON value as the result of a successful answer."""
    return b'{"result":' + result + b',"success":true,"errors":[],"messages":[]}'


def is_responses_request(body: bytes) -> bool:
    """Return whether a body has the field `input`, by which it is a Responses request.

    Raises ApiError 400 if it is not a JSON object.
    """
    if not body:
        raise ApiError(ErrorCode.INCOMPLETE_REQUEST, "cannot read the request: it has no body")
    return decode(body, _RESPONSES_SHAPE).input is not msgspec.UNSET


def with_model(body: bytes, model: str) -> bytes:
    """Return a JSON object with the field `model`, which Workers AI has in the path instead.

    Raises ApiError 400 if it has another one.
    """
    check_model(decode(body, _RESPONSES_SHAPE).model, model)
    return msgspec.json.encode({**_FIELDS.decode(body), "model": model})


def check_model(named: str | None, model: str) -> None:
    """Raise ApiError 400 if a body names another model than its path."""
    if named not in (None, model):
        reason = f"it is {named[:80]!r}, and the path names {model[:80]!r}"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field 'model': {reason}")


def translate_refusal(body: bytes) -> bytes:
    """Translate a replica's error response, which has OpenAI's format."""
    error = msgspec.json.decode(body)["error"]
    fields = error if isinstance(error, dict) else {"message": error}
    codes = {code.value: code for code in ErrorCode}
    meaning = MEANINGS[codes.get(str(fields.get("code")), ErrorCode.INVALID_REQUEST)]
    return encode_error_envelope(str(fields.get("message"))[:400], meaning.number)


def encode_error_event(error: ApiError) -> bytes:
    """Encode an error within a stream, as an event that `translate_frame` leaves unchanged."""
    envelope = encode_error_envelope(error.message, error.meaning.number)
    return ERROR_EVENT + b"data: " + envelope + b"\n\n"


def result_of(body: bytes, *, is_json: bool = False) -> dict[str, Any]:
    """Return the `result` of a complete OpenAI response.

    With `is_json` its text is returned as a JSON value; text that is not valid JSON stays text.
    """
    fields = _FIELDS.decode(body)
    if "results" not in fields and bytes(fields.get("object", b"")) == b'"list"':
        return _embeddings(fields["data"])
    answer: dict[str, Any] = msgspec.json.decode(body)
    if "results" in answer:
        ranking = [
            {"id": ranked["index"], "score": ranked["relevance_score"]}
            for ranked in answer["results"]
        ]
        return {"response": ranking}
    choice = (answer.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    text = message.get("content")
    if text is None:
        text = choice.get("text") or ""
    result: dict[str, Any] = {"response": _json_value(text) if is_json else text}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        result["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        result["tool_calls"] = [_run_tool_call(call["function"]) for call in message["tool_calls"]]
    if choice.get("finish_reason"):
        # The provider of the AI SDK tells by it that an answer was cut off, or calls tools.
        result["finish_reason"] = choice["finish_reason"]
    if answer.get("usage"):
        result["usage"] = answer["usage"]
    return result


def _embeddings(data: msgspec.Raw) -> dict[str, Any]:
    """Return the result for a list of embeddings. An answer may have millions of numbers, so they
    stay as the engine wrote them."""
    vectors = [item.embedding for item in _EMBEDDED.decode(data)]
    size = len(msgspec.json.decode(vectors[0])) if vectors else 0
    return {"shape": [len(vectors), size], "data": vectors}


def translate_frame(frame: bytes) -> bytes:
    """Translate one OpenAI frame; comments, `[DONE]` and unknown frames stay unchanged."""
    data = sse.frame_data(frame)
    if not data or data == b"[DONE]" or frame.startswith(ERROR_EVENT):
        return frame
    chunk = decode_chunk(data)
    if chunk is None:
        return frame
    choice = chunk.choices[0] if chunk.choices else ChunkChoice()
    delta = choice.delta or ChunkDelta()
    fields: dict[str, Any] = {"response": delta.content or choice.text or ""}
    if delta.reasoning_text:
        fields["reasoning_content"] = delta.reasoning_text
    if delta.tool_calls:
        fields["tool_calls"] = delta.tool_calls
    if choice.finish_reason:
        fields["finish_reason"] = choice.finish_reason
    if chunk.usage:
        fields["usage"] = chunk.usage
    return sse.data_frame(fields) if fields != {"response": ""} else b""


def encode_error_envelope(message: str, number: int) -> bytes:
    """Encode an error; clients tell errors apart by `number`."""
    errors = [{"code": number, "message": f"AiError: {message}"}]
    return msgspec.json.encode({"result": None, "success": False, "errors": errors, "messages": []})


def _json_value(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def _run_tool_call(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function call with its arguments as an object, as Workers AI does."""
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = function.get("arguments")
    return {"name": function.get("name"), "arguments": arguments}
