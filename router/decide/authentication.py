"""Who may ask: keys, from the table the router holds. An unknown key leaves nothing behind."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from isochrone.wire.keys import is_same_secret, parse_key
from isochrone.wire.routes import KeyEntry

_NO_SECRET_SHA256: Final = "0" * 64


def authenticate(
    keys: Mapping[KeyId, KeyEntry], authorization: str | None, now_unix_s: float
) -> KeyEntry:
    """Return whose key this is, or raise ApiError 401 saying what is wrong with it."""
    scheme, _, text = (authorization or "").strip().partition(" ")
    text = text.strip()
    if not text or (scheme != "Bearer" and scheme.lower() != "bearer"):
        raise _invalid("no API key: send `Authorization: Bearer iso_...`")
    parsed = parse_key(text)
    if parsed is None:
        raise _invalid("the API key is not of the form iso_..., copy it whole")
    key_id, secret_sha256 = parsed
    entry = keys.get(key_id)
    # Compared also where there is no such key, so that time does not tell.
    is_right = is_same_secret(entry.secret_sha256 if entry else _NO_SECRET_SHA256, secret_sha256)
    if entry is None or not is_right:
        raise _invalid("the API key is unknown or revoked")
    if entry.expires_at and entry.expires_at <= now_unix_s:
        raise _invalid("the API key has expired")
    return entry


class AuthenticationCache:
    """Who was let in, by a digest of what they showed: a key is taken apart once a table.

    Only what opened the door is remembered, and no secret is.
    """

    def __init__(self) -> None:
        """Begin with nobody known."""
        self._keys: Mapping[KeyId, KeyEntry] = {}
        self._entries: dict[bytes, KeyEntry] = {}

    def authenticate(
        self, keys: Mapping[KeyId, KeyEntry], authorization: bytes, now_unix_s: float
    ) -> KeyEntry:
        """Return whose key this is, or raise ApiError 401, as `authenticate` does."""
        if keys is not self._keys or len(self._entries) > 2 * len(keys):
            self._keys, self._entries = keys, {}
        # BLAKE2: OpenSSL's digests take twice as long to begin as to end.
        shown = blake2b(authorization).digest()
        entry = self._entries.get(shown)
        if entry is None or (entry.expires_at and entry.expires_at <= now_unix_s):
            entry = authenticate(keys, authorization.decode("latin-1"), now_unix_s)
            self._entries[shown] = entry
        return entry


def may_use(entry: KeyEntry, deployment: str) -> bool:
    """Say whether the key may ask for `deployment`, by name."""
    return not entry.deployments or deployment in entry.deployments


def _invalid(reason: str) -> ApiError:
    message = f"cannot accept the request: {reason}"
    return ApiError(ErrorCode.INVALID_KEY, message, headers={"www-authenticate": "Bearer"})
