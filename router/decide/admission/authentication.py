"""Authenticate API keys by the route table. An unknown key leaves no state behind."""

from hashlib import blake2b
from hmac import compare_digest
from typing import Final

from isochrone.wire.client_keys.keys import parse_key
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry, KeyTable

_NO_SECRET_SHA256: Final = "0" * 64


def authenticate(keys: KeyTable, authorization: str | None, now_unix_s: float) -> KeyEntry:
    """Return the entry of the key in an `Authorization` header, or raise ApiError 401."""
    scheme, _, text = (authorization or "").strip().partition(" ")
    text = text.strip()
    if not text or (scheme != "Bearer" and scheme.lower() != "bearer"):
        raise _invalid_key("You didn't provide an API key: send `Authorization: Bearer iso_...`")
    parsed = parse_key(text)
    if parsed is None:
        raise _incorrect_key("it is not of the form iso_..., copy it whole")
    key_id, secret_sha256 = parsed
    entry = keys.get(key_id)
    # In constant time, and even if there is no such key: timing does not tell whether there is one.
    is_right = compare_digest(entry.secret_sha256 if entry else _NO_SECRET_SHA256, secret_sha256)
    if entry is None or not is_right:
        raise _incorrect_key("it is unknown, revoked or expired")
    if entry.expires_at and entry.expires_at <= now_unix_s:
        raise _incorrect_key("it has expired")
    return entry


class AuthenticationCache:
    """Accepted `Authorization` headers, so that a key is parsed and hashed once per route table.

    Only accepted headers are kept, as digests: no secret is.
    """

    def __init__(self) -> None:
        self._keys = KeyTable()
        self._entries: dict[bytes, KeyEntry] = {}

    def authenticate(self, keys: KeyTable, authorization: bytes, now_unix_s: float) -> KeyEntry:
        """Return the entry of the key, or raise ApiError 401, as the function `authenticate`."""
        if keys is not self._keys:
            self._keys, self._entries = keys, {}
        # BLAKE2 because hashlib's OpenSSL digests have a far higher cost per call.
        digest = blake2b(authorization).digest()
        entry = self._entries.get(digest)
        if entry is None or (entry.expires_at and entry.expires_at <= now_unix_s):
            entry = authenticate(keys, authorization.decode("latin-1"), now_unix_s)
            if len(self._entries) > 2 * len(keys):
                self._entries = {}
            self._entries[digest] = entry
        return entry


def may_use(entry: KeyEntry, deployment: DeploymentEntry) -> bool:
    """Return whether the key may use a deployment. Keys name deployments by their ids."""
    return not entry.deployments or deployment.deployment_id in entry.deployments


def _incorrect_key(reason: str) -> ApiError:
    """Return the error in OpenAI's wording, by which clients recognise it."""
    return _invalid_key(f"Incorrect API key provided: {reason}")


def _invalid_key(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_KEY, message, headers={"www-authenticate": "Bearer"})
