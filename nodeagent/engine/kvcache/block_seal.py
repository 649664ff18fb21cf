"""The seal of a KV block that is stored outside this process: a file, or the PoP's store.

It names the block and holds a checksum over its content, its name and the model's fingerprint, so
that a damaged block, one of another name and one of another model or KV format are all noticed.
"""

from typing import Final

import xxhash

SEAL_MAGIC: Final = b"isochrone-kv-1\n"
DIGEST_BYTES: Final = 32
_CHECKSUM_BYTES: Final = 16
SEAL_BYTES: Final = len(SEAL_MAGIC) + DIGEST_BYTES + _CHECKSUM_BYTES


def seal(model_fingerprint: bytes, digest: bytes, content: bytes | bytearray | memoryview) -> bytes:
    """Return the seal of a block."""
    checksum = xxhash.xxh3_128(model_fingerprint + digest)
    checksum.update(content)
    return SEAL_MAGIC + digest + checksum.digest()
