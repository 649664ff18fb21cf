"""Errors in Anthropic's shape. Names are from Anthropic's API reference, "Errors". Pure."""

import re
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode

OVERLOADED_STATUS: Final = 529
"""Anthropic's status for a service that is full. Its clients retry it, as they do a 429, but do not
tell their user that a limit of the key is reached."""

_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""The type of an error by its status. Other statuses from 500 on are `api_error`."""

_LENGTHS: Final = re.compile(
    r"maximum context length is (\d+) tokens\. However, \D*(\d+) (?:input )?tokens"
)
"""How our engine and vLLM say the length of the context and of the prompt."""

_CODES: Final = {code.value: code for code in ErrorCode}

_DETAILS: Final[dict[str, dict[str, Any]]] = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
"""Details of the error, by the field that is refused. The tool runners of Anthropic's SDKs ask the
server to keep the conversation (`thread`); these details make them send all messages instead."""


def error_status(error: ApiError) -> int:
    """Return the HTTP status of an error on this surface."""
    return OVERLOADED_STATUS if error.code is ErrorCode.OUT_OF_CAPACITY else error.meaning.status


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return an error object; `request_id` is null within a stream, whose headers have it."""
    status = error_status(error)
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if status == OVERLOADED_STATUS:
        kind = "overloaded_error"
    elif status == 504:
        kind = "timeout_error"
    message = error.message
    if error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        message = _too_long(message)
    described: dict[str, Any] = {"type": kind, "message": message}
    if error.param in _DETAILS:
        described["details"] = _DETAILS[error.param]
    return {"type": "error", "error": described, "request_id": request_id}


def _too_long(message: str) -> str:
    """Return Anthropic's wording, by which Claude Code knows that it must compact its conversation,
    and by how much.
    """
    lengths = _LENGTHS.search(message)
    counts = f"{lengths[2]} tokens > {lengths[1]} maximum; " if lengths else ""
    return f"prompt is too long: {counts}{message}"


def translate_refusal(body: bytes, request_id: str) -> bytes:
    """Translate a replica's 4xx answer, which has OpenAI's format."""
    error = msgspec.json.decode(body)["error"]
    fields = error if isinstance(error, dict) else {"message": error}
    code = _CODES.get(str(fields.get("code")), ErrorCode.INVALID_REQUEST)
    refused = ApiError(code, str(fields.get("message"))[:400])
    return msgspec.json.encode(error_body(refused, request_id))
