"""Errors and lists in OpenAI's shapes."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.routes import DeploymentEntry
from router.dataplane.http1 import Reply


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


def error_reply(error: ApiError) -> Reply:
    """Return the whole error answer."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code is ErrorCode.INVALID_KEY:
        headers["www-authenticate"] = "Bearer"
    return Reply(error.meaning.status, msgspec.json.encode(error_body(error)), headers)


def error_response(error: ApiError) -> web.Response:
    """Return the same for a cold route."""
    reply = error_reply(error)
    return web.Response(
        status=reply.status,
        body=reply.body,
        headers=dict(reply.headers),
        content_type=reply.content_type,
    )


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
