"""The form of an API key: `iso_<key id>_<secret>_<checksum>`.

The checksum (CRC-32 in base 62, as in GitHub's tokens) detects a mistyped key without a look-up,
and lets secret scanners find leaked keys. Only the SHA-256 of the secret is stored. The secret has
256 random bits, so no slow password hash is needed.
"""

import hashlib
import zlib
from typing import Final

from isochrone.wire.ids import KeyId

PREFIX: Final = "iso"
ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_HEAD: Final = f"{PREFIX}_"
KEY_CHARS: Final = 67
SECRET_DIGITS: Final = 43
"""Base-62 digits that hold 256 bits."""
_PAIRS: Final = tuple(high + low for high in ALPHABET for low in ALPHABET)


def encode_secret(secret_bytes: bytes) -> str:
    """Return 32 random bytes as SECRET_DIGITS digits and letters."""
    number, digits = int.from_bytes(secret_bytes), []
    for _ in range(SECRET_DIGITS):
        number, digit = divmod(number, 62)
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    # Six base-62 digits, two at a time: this runs on every request.
    rest, low = divmod(zlib.crc32(body.encode()), 3844)
    high, middle = divmod(rest, 3844)
    return _PAIRS[high] + _PAIRS[middle] + _PAIRS[low]


def format_key(key_id: KeyId, secret_bytes: bytes) -> str:
    """Return a key, which is shown to the operator once. `secret_bytes` are 32 random bytes."""
    body = f"{PREFIX}_{key_id}_{encode_secret(secret_bytes)}"
    return f"{body}_{_checksum(body)}"


def parse_key(text: str) -> tuple[KeyId, str] | None:
    """Return a key's (key id, SHA-256 of the secret in hex), or None if it is malformed."""
    if len(text) != KEY_CHARS or not text.startswith(_HEAD) or not text.isascii():
        return None
    # The alphabet is not checked: only format_key produces a matching checksum.
    if text[16] != "_" or text[60] != "_" or _checksum(text[:60]) != text[61:]:
        return None
    return KeyId(text[4:16]), secret_sha256(text[17:60])


def secret_sha256(secret: str) -> str:
    """Return the hash of a secret that the store and the routers keep."""
    return hashlib.sha256(secret.encode()).hexdigest()
