"""Who may call what on the admin listener: everything is the administrator's but a few paths."""

import hashlib
import hmac
from typing import Final

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode

OPEN_PATHS: Final = frozenset({"/healthz", "/metrics", "/openapi.json"})


def check_token(request: web.Request, token_sha256: str) -> None:
    """Raise ApiError unless the request carries the admin token. Takes the same time either way."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = hashlib.sha256(token.strip().encode()).hexdigest()
    if not hmac.compare_digest(given, token_sha256) or scheme.lower() != "bearer":
        raise ApiError(
            ErrorCode.INVALID_KEY,
            "cannot tell who asks: send `Authorization: Bearer <admin token>`",
        )
