"""Checks a client's JSON body so that every later parser reads the same text from it.

A body passes through several parsers: the router's, the node's and the engine's. If one parser
reads a body that another refuses, a check can be bypassed: a node that could not decode a body once
sent it to an engine that could. So the router and the node accept only text that all of them read.
"""

from itertools import accumulate
from typing import Final

from isochrone.wire.http.body_loops import (
    BRACKETS_FEW,
    LONE_SURROGATE,
    MANY_BRACKETS,
    MANY_QUOTES,
    NOT_ASCII,
    QUOTES_FEW,
    scan_body,
)

JSON_DEPTH_MAX: Final = BRACKETS_FEW
"""Levels of nested arrays and objects in a body. The strictest parser behind the router, serde in
Rust, accepts 127; pydantic accepts 200, msgspec and Python's json somewhat less than 1000. Below 96
fit a JSON schema of 64 levels, the engine's own limit, and the request around it."""

JSON_CONTAINERS_MAX: Final = 100_000
"""Arrays and objects in a body. More than any real request has; it bounds the work of parsing."""

JSON_STRINGS_MAX: Final = QUOTES_FEW // 2
"""Texts and names of fields in a body, for the same reason. A `logit_bias` may name each token."""

_NOT_BRACKETS_OR_QUOTES: Final = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class UnsafeJson(ValueError):
    """Parsers may disagree about this body; the error text says what is wrong with it."""


def check_json_body(body: bytes) -> None:
    """Raise UnsafeJson for invalid UTF-8, a lone surrogate, too much nesting or too many strings.

    The syntax is left to the decoder that follows.
    """
    found = scan_body(body)
    if found & NOT_ASCII:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise UnsafeJson("not valid UTF-8") from error
    if found & LONE_SURROGATE:
        raise UnsafeJson("it has a lone surrogate (\\ud800 to \\udfff without its other half)")
    if found & MANY_BRACKETS:
        _check_nesting(body)
    # A quote that begins a string has no backslash before it.
    if found & MANY_QUOTES and body.count(b'"') - body.count(b'\\"') > QUOTES_FEW:
        raise UnsafeJson(f"more than {JSON_STRINGS_MAX} strings")


def _check_nesting(body: bytes) -> None:
    """Raise UnsafeJson if arrays and objects outside strings are too deep or too many."""
    # Without escaped quotes every other part between quotes is outside strings. Two quotes without
    # a bracket between them may go: a body has a million of them.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = unescaped.translate(None, _NOT_BRACKETS_OR_QUOTES).replace(b'""', b"")
    brackets = b"".join(kept.split(b'"')[::2])
    if len(brackets) > 2 * JSON_CONTAINERS_MAX:
        raise UnsafeJson(f"more than {JSON_CONTAINERS_MAX} arrays and objects")
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > JSON_DEPTH_MAX:
        raise UnsafeJson(f"nested {depth} levels deep, the limit is {JSON_DEPTH_MAX}")
