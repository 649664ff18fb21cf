"""Sums over a table of keys, by which a scheduler learns what a router already has.

Each key belongs to one of KEY_BUCKETS by its id. A bucket's sum adds a digest of each of its keys,
modulo 2**64, so that it does not depend on their order and a change of a key costs two digests.
Two tables with equal sums of a bucket have the same keys in it.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final
from zlib import crc32

import msgspec

KEY_BUCKETS: Final = 2048
"""With a million keys, a changed key brings some 500 others with it: about one part of a table.
The sums take 16 KiB of a registration, whose limit is 64 KiB."""

_SUM_BYTES: Final = 8
_MASK: Final = 2**64 - 1

KEPT_SHARE_MIN: Final = 0.75
"""A router that has fewer of the buckets than this gets the whole table: comparing the buckets
would cost it as much."""


def bucket_of(key_id: str) -> int:
    """Return the bucket of a key."""
    return crc32(key_id.encode()) % KEY_BUCKETS


class KeySums:
    """The sums of all buckets of one table."""

    __slots__ = ("_sums",)

    def __init__(self, sums: "array[int] | None" = None) -> None:
        """Take these sums; without any, those of an empty table."""
        self._sums = array("Q", bytes(_SUM_BYTES * KEY_BUCKETS)) if sums is None else sums

    def copy(self) -> "KeySums":
        """Return sums that change independently of these."""
        return KeySums(self._sums[:])

    def add(self, key_id: str, entry: msgspec.Struct) -> None:
        """Add a key."""
        bucket = bucket_of(key_id)
        self._sums[bucket] = (self._sums[bucket] + _digest(entry)) & _MASK

    def remove(self, key_id: str, entry: msgspec.Struct) -> None:
        """Remove a key that was added."""
        bucket = bucket_of(key_id)
        self._sums[bucket] = (self._sums[bucket] - _digest(entry)) & _MASK

    def encode(self) -> bytes:
        """Return the sums as bytes, little-endian."""
        sums = self._sums
        if sys.byteorder == "big":
            sums = sums[:]
            sums.byteswap()
        return sums.tobytes()


class KeptBuckets:
    """The buckets whose keys a router keeps, one bit each."""

    __slots__ = ("_bits",)

    def __init__(self, bits: bytes) -> None:
        """Read the bits of `encode`. Raises ValueError for any other number of bits."""
        if len(bits) * 8 != KEY_BUCKETS:
            raise ValueError(f"{8 * len(bits)} buckets of keys, expected {KEY_BUCKETS}")
        self._bits = bits

    @classmethod
    def of(cls, buckets: Iterable[int]) -> "KeptBuckets":
        """Return these buckets."""
        bits = bytearray(KEY_BUCKETS // 8)
        for bucket in buckets:
            bits[bucket // 8] |= 1 << bucket % 8
        return cls(bytes(bits))

    def __contains__(self, bucket: int) -> bool:
        return bool(self._bits[bucket // 8] >> bucket % 8 & 1)

    @property
    def are_all(self) -> bool:
        """Whether no bucket is missing."""
        return self._bits.count(0xFF) == len(self._bits)

    def encode(self) -> bytes:
        """Return the bits."""
        return self._bits


def kept_buckets(sums_held: bytes, sums: KeySums) -> KeptBuckets | None:
    """Return the buckets of which a router with the sums `sums_held` has just the keys of `sums`.

    None if they are too few, or if `sums_held` is not of this version.
    """
    encoded = sums.encode()
    if len(sums_held) != len(encoded):
        return None
    if sums_held == encoded:
        return KeptBuckets.of(range(KEY_BUCKETS))
    same = [
        bucket
        for bucket in range(KEY_BUCKETS)
        if sums_held[_SUM_BYTES * bucket : _SUM_BYTES * (bucket + 1)]
        == encoded[_SUM_BYTES * bucket : _SUM_BYTES * (bucket + 1)]
    ]
    return KeptBuckets.of(same) if len(same) >= KEPT_SHARE_MIN * KEY_BUCKETS else None


def _digest(entry: msgspec.Struct) -> int:
    encoded = msgspec.msgpack.encode(entry)
    return int.from_bytes(blake2b(encoded, digest_size=_SUM_BYTES).digest(), "little")
