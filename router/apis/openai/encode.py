"""Errors and lists in OpenAI's shapes."""

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from isochrone.service.door import error_response
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.routes import DeploymentEntry


def error_body(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object; `code` is what a program should look at."""
    status = error.meaning.status
    kind = "invalid_request_error"
    if error.code is ErrorCode.RATE_LIMITED:
        kind = "rate_limit_error"
    elif error.code is ErrorCode.QUOTA_EXCEEDED:
        kind = "insufficient_quota"
    elif status >= 500 or error.code is ErrorCode.OUT_OF_CAPACITY:
        kind = "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code.value,
        }
    }


def error_answer(error: ApiError) -> web.Response:
    """Return the whole error response."""
    response = error_response(error, msgspec.json.encode(error_body(error)))
    if error.code is ErrorCode.INVALID_KEY:
        response.headers["www-authenticate"] = "Bearer"
    return response


def error_event(error: ApiError) -> bytes:
    """Return an error within a stream. No `[DONE]` follows: the answer is not whole."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"


def model_body(entry: DeploymentEntry) -> dict[str, Any]:
    """Return one entry of the list of models."""
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created_at,
        "owned_by": "isochrone",
        "context_window": entry.context_tokens,
    }


def models_body(entries: Iterable[DeploymentEntry]) -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [model_body(entry) for entry in entries]}
