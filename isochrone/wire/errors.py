"""Every error that a caller can get: its code, its HTTP status and its number.

Routers and engines share these codes and the encoding as an OpenAI error object. The numbers are
those of Workers AI where it documents one for the same error. Three errors share status 429: a rate
limit (retry in seconds), a used-up quota (retry tomorrow), and a fleet without free capacity.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec


class ErrorCode(StrEnum):
    """The kind of error, for programs."""

    INVALID_REQUEST = "invalid_request"
    INCOMPLETE_REQUEST = "incomplete_request"
    INVALID_IMAGE_URL = "invalid_image_url"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_KEY = "invalid_api_key"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    WRONG_MODEL_KIND = "wrong_model_kind"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    ADAPTER_INCOMPLETE = "adapter_incomplete"
    ADAPTERS_UNSUPPORTED = "adapters_unsupported"
    REQUEST_TIMEOUT = "request_timeout"
    CONFLICT = "conflict"
    MODEL_RETIRED = "model_retired"
    PRECONDITION_FAILED = "precondition_failed"
    TOO_LARGE = "request_too_large"
    REQUEST_SUSPENDED = "request_suspended"
    RATE_LIMITED = "rate_limit_exceeded"
    QUOTA_EXCEEDED = "insufficient_quota"
    OUT_OF_CAPACITY = "out_of_capacity"
    INTERNAL = "internal_error"
    UPSTREAM = "upstream_error"
    UNAVAILABLE = "unavailable"


class Meaning(NamedTuple):
    """The HTTP status and the Workers AI number of a code."""

    status: int
    number: int


MEANINGS: Final[dict[ErrorCode, Meaning]] = {
    ErrorCode.INVALID_REQUEST: Meaning(400, 5006),
    ErrorCode.INCOMPLETE_REQUEST: Meaning(400, 3003),
    ErrorCode.INVALID_IMAGE_URL: Meaning(400, 5006),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Meaning(400, 5006),
    ErrorCode.INVALID_KEY: Meaning(401, 10000),
    ErrorCode.FORBIDDEN: Meaning(403, 3041),
    ErrorCode.NOT_FOUND: Meaning(404, 7003),
    ErrorCode.MODEL_NOT_FOUND: Meaning(404, 3042),
    ErrorCode.WRONG_MODEL_KIND: Meaning(400, 5007),
    ErrorCode.METHOD_NOT_ALLOWED: Meaning(405, 10405),
    ErrorCode.ADAPTER_INCOMPLETE: Meaning(400, 3039),
    ErrorCode.ADAPTERS_UNSUPPORTED: Meaning(405, 5005),
    ErrorCode.REQUEST_TIMEOUT: Meaning(408, 3007),
    ErrorCode.CONFLICT: Meaning(409, 10409),
    ErrorCode.MODEL_RETIRED: Meaning(410, 5028),
    ErrorCode.PRECONDITION_FAILED: Meaning(412, 10412),
    ErrorCode.TOO_LARGE: Meaning(413, 3006),
    # Not 503 or 429: SDKs and proxies send those again at once, to another engine.
    ErrorCode.REQUEST_SUSPENDED: Meaning(422, 10422),
    ErrorCode.RATE_LIMITED: Meaning(429, 10429),
    ErrorCode.QUOTA_EXCEEDED: Meaning(429, 3036),
    ErrorCode.OUT_OF_CAPACITY: Meaning(429, 3040),
    ErrorCode.INTERNAL: Meaning(500, 10500),
    ErrorCode.UPSTREAM: Meaning(502, 10502),
    ErrorCode.UNAVAILABLE: Meaning(503, 10503),
}


NOT_THE_CLIENTS: Final = (ErrorCode.OUT_OF_CAPACITY, ErrorCode.REQUEST_SUSPENDED)
"""Codes with a 4xx status that do not say that the client did something wrong."""


class ApiError(Exception):
    """An error answer. Any code below an HTTP server may raise it; only the server encodes it.

    `headers` are sent with every encoding of the error.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    @property
    def meaning(self) -> Meaning:
        """The HTTP status and number of this error's code."""
        return MEANINGS[self.code]


def unusable_field(field: str, reason: str) -> ApiError:
    """Return the error 400 for a field of a body whose value cannot be used."""
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field '{field}': {reason}", param=field)


def method_not_allowed(method: str, path: str, allowed: Sequence[str]) -> ApiError:
    """Return the error for a method that a path does not have; `allowed` are those it has."""
    useful = " or ".join(name for name in allowed if name != "HEAD")
    return ApiError(
        ErrorCode.METHOD_NOT_ALLOWED,
        f"cannot use the method {method} for {path[:200]}: use {useful}",
        headers={"allow": ", ".join(allowed)},
    )


def context_length_message(context_tokens: int, excess: str) -> str:
    """Return OpenAI's wording, by which clients recognise the error; `excess` names the part that
    is too long."""
    return f"This model's maximum context length is {context_tokens} tokens. However, {excess}."


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object. Programs should look at its `code`."""
    kind = "invalid_request_error"
    if error.code is ErrorCode.RATE_LIMITED:
        kind = "rate_limit_error"
    elif error.code is ErrorCode.QUOTA_EXCEEDED:
        kind = "insufficient_quota"
    elif error.meaning.status >= 500 or error.code in NOT_THE_CLIENTS:
        kind = "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code.value,
        }
    }


def openai_error_event(error: ApiError) -> bytes:
    """Return an error as an event of a stream. No `[DONE]` follows: the answer is incomplete."""
    return b"data: " + msgspec.json.encode(openai_error(error)) + b"\n\n"
