"""The loops over every byte of a request: a scan of its JSON, its prompt's hashes, its images.

The compiled request path has these loops in C (`body_bytes.c`), with the same results, because they
would be most of the cost of a large body. Without it the loops of `re` and `xxhash` are used.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import xxhash

NOT_ASCII: Final = 1
LONE_SURROGATE: Final = 2
MANY_BRACKETS: Final = 4
MANY_QUOTES: Final = 8
BRACKETS_FEW: Final = 96
QUOTES_FEW: Final = 400_000
r"""The findings of a scan: bytes above 127; one of `\uD800` to `\uDFFF` without its other half;
more than BRACKETS_FEW opening brackets; and more than QUOTES_FEW quotes. Bytes within strings
count like those outside."""

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def scan_in_python(body: bytes) -> int:
    """Return what a body has, as the sum of the constants above."""
    found = 0 if body.isascii() else NOT_ASCII
    first = body.find(b"\\")
    if first >= 0 and _SURROGATE.search(body, first) is not None and _has_lone_surrogate(body):
        found |= LONE_SURROGATE
    if len(body) > QUOTES_FEW and body.count(b'"') > QUOTES_FEW:
        found |= MANY_QUOTES
    opened = 0
    for bracket in (b"[", b"{"):
        # A search for one byte is a hundred times as fast as a count, and most bodies have few.
        position = body.find(bracket)
        while position >= 0:
            opened += 1
            if opened > BRACKETS_FEW:
                return found | MANY_BRACKETS
            position = body.find(bracket, position + 1)
    return found


def _has_lone_surrogate(body: bytes) -> bool:
    # Escaped backslashes (`\\ud800` is no escape) and pairs are each replaced by a placeholder, so
    # that the bytes around them do not become adjacent.
    unpaired = _SURROGATE_PAIR.sub(b"_", body.replace(b"\\\\", b"_"))
    return _SURROGATE.search(unpaired) is not None


def hash_in_python(prompt: bytes, ends: Sequence[int], seed: int) -> list[int]:
    """Return the XXH3 of each block of a prompt, with the hash before it as its seed.

    A block has 128 bytes, or more than 240.
    """
    hashes: list[int] = []
    view = memoryview(prompt)
    key, begin = seed, 0
    for end in ends:
        key = xxhash.xxh3_64_intdigest(view[begin:end], key)
        hashes.append(key)
        begin = end
    return hashes


def know_no_base64(text: str, begin: int) -> bool:
    """Return False: without the loop in C, decoding is the fastest check."""
    return False


scan_body: Callable[[bytes], int] = scan_in_python
chained_hashes: Callable[[bytes, Sequence[int], int], Sequence[int]] = hash_in_python
"""In C the hashes are also a buffer with eight bytes for each, which `block_table.c` reads."""

is_surely_base64: Callable[[str, int], bool] = know_no_base64
"""Whether a text is from `begin` on base64 that `validate=True` accepts; False if not known."""

with suppress(ImportError):
    _IN_C = importlib.import_module("isochrone.wire.http.body_bytes")
    scan_body, chained_hashes = _IN_C.scan_body, _IN_C.chained_hashes
    is_surely_base64 = _IN_C.is_surely_base64
