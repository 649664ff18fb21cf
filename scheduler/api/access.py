"""Who may call what on the admin listener: one table, and what is not in it is refused."""

import hashlib
import hmac
from enum import StrEnum
from typing import Final

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode


class Access(StrEnum):
    """Who may."""

    OPEN = "open"
    ADMIN = "admin"


OPEN_PATHS: Final = frozenset({"/healthz", "/metrics", "/openapi.json"})


def access_of(path: str) -> Access:
    """Return who may call a path; everything is the administrator's but a few."""
    return Access.OPEN if path in OPEN_PATHS else Access.ADMIN


def check_token(request: web.Request, token_sha256: str) -> None:
    """Raise ApiError unless the request carries the admin token. Takes the same time either way."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = hashlib.sha256(token.strip().encode()).hexdigest()
    if not hmac.compare_digest(given, token_sha256) or scheme.lower() != "bearer":
        raise ApiError(
            ErrorCode.INVALID_KEY,
            "cannot tell who asks: send `Authorization: Bearer <admin token>`",
        )
