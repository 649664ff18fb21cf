"""Errors and lists in OpenAI's shapes."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.routes import DeploymentEntry
from router.dataplane.http1 import lines_of
from router.dataplane.message import Reply


def error_headers(error: ApiError) -> dict[str, str]:
    """Return the headers that go with an error."""
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code is ErrorCode.INVALID_KEY:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_reply(error: ApiError) -> Reply:
    """Return the whole error answer."""
    body = msgspec.json.encode(openai_error(error))
    return Reply(error.meaning.status, body, lines_of(error_headers(error)))


def error_response(error: ApiError) -> web.Response:
    """Return the same for a cold route."""
    reply = error_reply(error)
    return web.Response(
        status=reply.status,
        body=reply.body,
        headers=error_headers(error),
        content_type=reply.content_type,
    )


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
