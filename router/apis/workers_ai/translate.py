"""Between Workers AI's bodies and OpenAI's, which the corridor and the engines speak. Pure.

Field names and frames are those of Cloudflare's REST API reference, "Execute AI model".
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from isochrone.wire.errors import MEANINGS, ApiError, ErrorCode
from router.apis.openai.decode import decode
from router.apis.openai.schema import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    RerankDocument,
    RouterOptions,
)
from router.dataplane import sse
from router.dataplane.chunk import ChunkChoice, ChunkDelta, chunk_of

ERROR_EVENT: Final = b"event: error\n"
MAX_TOKENS_USUAL: Final = 256
"""What Workers AI puts out where a request does not say."""

_PASSED: Final = (
    *("temperature", "top_p", "top_k", "seed", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "response_format", "tool_choice"),
)


class ResponseFormat(msgspec.Struct, frozen=True):
    """What an answer is to be."""

    type: str = "text"


class RunRequest(msgspec.Struct, frozen=True):
    """What `/ai/run` takes: a prompt, messages, texts to embed, or a query with texts to rank.

    The rest goes on as it is.
    """

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: list[msgspec.Raw] | None = None
    text: str | Annotated[list[str], Meta(min_length=1, max_length=2048)] | None = None
    query: Annotated[str, Meta(min_length=1)] | None = None
    contexts: Annotated[list[RerankDocument], Meta(min_length=1, max_length=1024)] | None = None
    top_k: int | None = None
    response_format: ResponseFormat | None = None
    lora: str | None = None
    stream: bool = False
    raw: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    tools: list[dict[str, Any]] | None = None
    options: RouterOptions | None = None


_run: Final = msgspec.json.Decoder(RunRequest)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def to_openai(body: bytes, model: str) -> tuple[str, bytes, bool]:
    """Return the OpenAI path and body that ask for the same, and whether for a JSON value.

    Raises ApiError 400.
    """
    run = decode(body, _run)
    _check(run, model)
    if run.text is not None:
        asked: dict[str, Any] = {"model": model, "input": run.text}
        return EMBEDDINGS_PATH, msgspec.json.encode(asked), False
    if run.query is not None:
        asked = {"model": model, "query": run.query, "documents": run.contexts}
        if run.top_k is not None:
            asked["top_n"] = run.top_k
        return RERANK_PATH, msgspec.json.encode(asked), False
    sent = _fields.decode(body)
    asked = {name: sent[name] for name in _PASSED if name in sent}
    asked |= {"model": model, "max_tokens": run.max_tokens or MAX_TOKENS_USUAL}
    if run.options is not None:
        asked["options"] = run.options
    if run.stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if run.tools:
        asked["tools"] = [_tool(tool) for tool in run.tools]
    is_json = run.response_format is not None and run.response_format.type != "text"
    if run.raw and run.prompt is not None:
        return COMPLETIONS_PATH, msgspec.json.encode({**asked, "prompt": run.prompt}), is_json
    user = [{"role": "user", "content": run.prompt}]
    chat = {**asked, "messages": run.messages or user}
    return CHAT_PATH, msgspec.json.encode(chat), is_json


def _check(run: RunRequest, model: str) -> None:
    """Raise ApiError 400 where a request is not for one thing, or for what there is not."""
    kinds = ("prompt", "messages", "text", "query")
    given = [name for name in kinds if getattr(run, name) is not None]
    if len(given) != 1:
        told = f"{' and '.join(given)} are given" if given else "none is given"
        wrong = f"give one of prompt, messages, text and query; {told}"
    elif run.query is not None and run.contexts is None:
        wrong = "a query needs contexts, the texts to rank"
    elif run.lora:
        wrong = "lora names an adapter, and none is offered"
    else:
        return
    raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot run {model}: {wrong}")


def whole_of(body: bytes, *, is_json: bool) -> bytes:
    """Write a whole OpenAI answer as one of this surface."""
    result = result_of(body, is_json=is_json)
    return msgspec.json.encode({"result": result, "success": True, "errors": [], "messages": []})


def refusal_of(body: bytes) -> bytes:
    """Write a replica's refusal of the request, which comes in OpenAI's shape."""
    error = msgspec.json.decode(body)["error"]
    told = error if isinstance(error, dict) else {"message": error}
    known = {one.value: one for one in ErrorCode}
    meaning = MEANINGS[known.get(str(told.get("code")), ErrorCode.INVALID_REQUEST)]
    return error_envelope(str(told.get("message"))[:400], meaning.number)


def error_event(error: ApiError) -> bytes:
    """Write an error within a stream, in a frame that `frame_of` leaves as it is."""
    return ERROR_EVENT + b"data: " + error_envelope(error.message, error.meaning.number) + b"\n\n"


def result_of(body: bytes, *, is_json: bool = False) -> dict[str, Any]:
    """Return the `result` that a whole OpenAI answer amounts to.

    With `is_json` its text comes as the value it is; one cut short stays text.
    """
    answer: dict[str, Any] = msgspec.json.decode(body)
    if "results" in answer:
        ranked = [
            {"id": one["index"], "score": one["relevance_score"]} for one in answer["results"]
        ]
        return {"response": ranked}
    if answer.get("object") == "list":
        vectors = [one["embedding"] for one in answer["data"]]
        return {"shape": [len(vectors), len(vectors[0]) if vectors else 0], "data": vectors}
    choice = (answer.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    text = message.get("content")
    if text is None:
        text = choice.get("text") or ""
    result: dict[str, Any] = {"response": _value_of(text) if is_json else text}
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(call["function"]) for call in message["tool_calls"]]
    if answer.get("usage"):
        result["usage"] = answer["usage"]
    return result


def frame_of(frame: bytes) -> bytes:
    """Return what one OpenAI frame is on this surface; comments, `[DONE]` and what is none stay."""
    data = sse.data_of(frame)
    if not data or data == b"[DONE]" or frame.startswith(ERROR_EVENT):
        return frame
    chunk = chunk_of(data)
    if chunk is None:
        return frame
    choice = chunk.choices[0] if chunk.choices else ChunkChoice()
    delta = choice.delta or ChunkDelta()
    told: dict[str, Any] = {"response": delta.content or choice.text or ""}
    if delta.tool_calls:
        told["tool_calls"] = delta.tool_calls
    if choice.finish_reason:
        told["finish_reason"] = choice.finish_reason
    if chunk.usage:
        told["usage"] = chunk.usage
    return sse.data_frame(told) if told != {"response": ""} else b""


def error_envelope(message: str, number: int) -> bytes:
    """Write an error; `number` is what a program should look at."""
    errors = [{"code": number, "message": f"AiError: {message}"}]
    return msgspec.json.encode({"result": None, "success": False, "errors": errors, "messages": []})


def _value_of(text: str) -> Any:
    """Return the value that a text of JSON is, else the text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's envelope; Workers AI takes it flat too."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, as Workers AI gives them."""
    try:
        arguments = msgspec.json.decode(function.get("arguments") or "{}")
    except msgspec.DecodeError:
        arguments = function.get("arguments")
    return {"name": function.get("name"), "arguments": arguments}
