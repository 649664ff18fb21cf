"""The form of an API key: `iso_<key id>_<secret>_<checksum>`.

The checksum (CRC-32 in base 62, as in GitHub's tokens) tells a typing error from a wrong key
without a look-up, and lets secret scanners find leaked keys. Only SHA-256 of the secret is kept:
it has 256 bits of chance, so no slow hash is needed.
"""

import hashlib
import hmac
import zlib
from typing import Final

from isochrone.wire.ids import KeyId

PREFIX: Final = "iso"
ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_HEAD: Final = f"{PREFIX}_"
KEY_CHARS: Final = 67
_PAIRS: Final = tuple(high + low for high in ALPHABET for low in ALPHABET)


def base62(number: int, width: int) -> str:
    """Write `number` in base 62, `width` digits, the lowest digits where it is larger."""
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    # As base62 of six digits, two at a time: this is on every request's way.
    rest, low = divmod(zlib.crc32(body.encode()), 3844)
    high, middle = divmod(rest, 3844)
    return _PAIRS[high] + _PAIRS[middle] + _PAIRS[low]


def format_key(key_id: KeyId, secret_bytes: bytes) -> str:
    """Return the whole key, shown once. `secret_bytes` are 32 bytes of chance."""
    body = f"{PREFIX}_{key_id}_{base62(int.from_bytes(secret_bytes), 43)}"
    return f"{body}_{_checksum(body)}"


def parse_key(text: str) -> tuple[KeyId, str] | None:
    """Return (key id, SHA-256 of the secret in hex), or None where the form is wrong."""
    if len(text) != KEY_CHARS or not text.startswith(_HEAD) or not text.isascii():
        return None
    # The checksum vouches for the letters: what it lets pass was written by `format_key`.
    if text[16] != "_" or text[60] != "_" or _checksum(text[:60]) != text[61:]:
        return None
    return KeyId(text[4:16]), secret_sha256(text[17:60])


def secret_sha256(secret: str) -> str:
    """Return what the store and the routers keep of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def is_same_secret(one_sha256: str, other_sha256: str) -> bool:
    """Compare in a time that does not tell how much was right."""
    return hmac.compare_digest(one_sha256, other_sha256)
