"""Authentication on the admin listener: every path but a few needs the administrator's token."""

import hashlib
import hmac
from typing import Final

from aiohttp import web

from isochrone.wire.client_keys.keys import PREFIX as KEY_PREFIX
from isochrone.wire.errors import ApiError, ErrorCode

OPEN_PATHS: Final = frozenset({"/healthz", "/metrics", "/openapi.json"})


def check_token(request: web.Request, token_sha256: str) -> None:
    """Raise ApiError unless the request has the admin token. Takes constant time."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Bytes that are not UTF-8 arrive as lone surrogates.
    sent_sha256 = hashlib.sha256(token.strip().encode(errors="surrogateescape")).hexdigest()
    if not hmac.compare_digest(sent_sha256, token_sha256) or scheme.lower() != "bearer":
        reason = "send `Authorization: Bearer <admin token>`"
        if scheme.lower() == "bearer" and token.strip():
            reason = "the admin token is wrong"
            if token.strip().startswith(f"{KEY_PREFIX}_"):
                reason = "this is the admin API; a client's key is for routers"
        raise ApiError(ErrorCode.INVALID_KEY, f"cannot authenticate: {reason}")
