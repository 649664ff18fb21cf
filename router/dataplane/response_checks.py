"""Checks a node's response: may it go to the client, or should another replica be tried?"""

import re
from typing import Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.http import headers
from router.dataplane.exchange import AttemptFailed, ResponseHead
from router.dataplane.usage import (
    RESPONSE_USAGE,
    UsageCount,
    add_cached_tokens,
    usage_of,
)
from router.decide.attempt import FailureCause

_ENGINE_LOST: Final = headers.ENGINE_LOST.encode()
_CODES: Final = {
    404: ErrorCode.NOT_FOUND,
    413: ErrorCode.TOO_LARGE,
    429: ErrorCode.OUT_OF_CAPACITY,
}
"""The code of an engine's error that has none, by status. Others are invalid requests."""

_OURS: Final = {code.value: code for code in ErrorCode}

_TOO_LONG: Final = re.compile(
    r"maximum context length|model's context length|max_model_len=|available context size"
    r"|max_seq_len|max_input_len|should not exceed max_num_tokens"
)
"""How vLLM, SGLang, llama.cpp and TensorRT-LLM refuse what does not fit into the context."""


def check_status(node_id: str, head: ResponseHead) -> None:
    """Raise AttemptFailed if another replica might do better.

    Responses with status 200 or 4xx go to the client.
    """
    if head.refusal == headers.CANNOT_RESUME:
        raise AttemptFailed(FailureCause.CANNOT_RESUME, f"{node_id} cannot continue a text")
    if head.refusal:
        raise AttemptFailed(
            FailureCause.REFUSED, f"{node_id} refused: {head.refusal}", head.refusal
        )
    if head.status >= 500 and _ENGINE_LOST in head.fields:
        raise AttemptFailed(FailureCause.ENGINE_LOST, f"{node_id} lost its engine")
    if head.status >= 500:
        raise AttemptFailed(FailureCause.ERROR, f"{node_id} answered {head.status}")
    if head.status < 200 or 200 < head.status < 400:
        raise AttemptFailed(FailureCause.BROKEN, f"{node_id} answered {head.status}")


def read_usage(node_id: str, body: bytes) -> tuple[UsageCount | None, bytes]:
    """Return the usage of a complete response, and the body with `cached_tokens` in it.

    Only the usage is decoded. A body that has `cached_tokens` is returned unchanged.
    """
    try:
        usage = RESPONSE_USAGE.decode(body).usage
    except msgspec.ValidationError:
        return _read_unusual_usage(node_id, body)
    except (ValueError, RecursionError):
        raise _not_an_object(node_id) from None
    if usage is None:
        return None, body
    details = usage.prompt_tokens_details
    if details is None or details.cached_tokens is None:
        return _read_unusual_usage(node_id, body)
    return UsageCount(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens), body


def _read_unusual_usage(node_id: str, body: bytes) -> tuple[UsageCount | None, bytes]:
    """Read a usage that lacks `cached_tokens` or has unexpected types."""
    try:
        decoded = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        raise _not_an_object(node_id) from None
    if not isinstance(decoded, dict):
        raise _not_an_object(node_id)
    if add_cached_tokens(decoded):
        body = msgspec.json.encode(decoded)
    return usage_of(decoded), body


def _not_an_object(node_id: str) -> AttemptFailed:
    return AttemptFailed(FailureCause.BROKEN, f"{node_id} sent no JSON object")


def client_error_body(body: bytes, status: int) -> bytes:
    """Return the body of an engine's 4xx response as an OpenAI error object with a code.

    vLLM and llama.cpp have the status as `code`, SGLang and TensorRT-LLM have the fields without
    `error` around them, FastAPI has `detail`, and errors of our nodes have no `type`. Raises
    ApiError if the body names no reason.
    """
    try:
        decoded = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        decoded = None
    fields = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    own_code = fields.get("code") if isinstance(fields, dict) and fields is not decoded else None
    if isinstance(own_code, str) and isinstance(fields, dict) and "type" in fields:
        return body
    message = _reason(fields)
    if not message:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot answer: the replica refused the request with status {status} and no reason",
        )
    code = _CODES.get(status, ErrorCode.INVALID_REQUEST)
    if isinstance(own_code, str):
        code = _OURS.get(own_code, code)
    elif status == 400 and _TOO_LONG.search(message):
        code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
    param = fields.get("param") if isinstance(fields, dict) else None
    error = ApiError(code, message, param=param if isinstance(param, str) else None)
    return msgspec.json.encode(openai_error(error))


def _reason(fields: object) -> str:
    """Return the message of an engine's error, "" if there is none."""
    if isinstance(fields, dict):
        for name in ("message", "detail", "error"):
            found = fields.get(name)
            if found:
                return found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return fields if isinstance(fields, str) else ""
