"""Reads plain messages at once: most requests, nodes' notices, and most answers but streams.

The compiled request path has this in C (`head_bytes.c`, which says what is plain), because a parser
calls back for each header. Everything else, and each part of a message that comes in parts, is left
to the parser, which alone decides what is refused.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress

from router.dataplane.http1 import HeaderFields

PlainRequest = tuple[bytes, HeaderFields, bytes]
"""The target of a POST request, its headers and its body."""

PlainResponse = tuple[int, HeaderFields, bytes]
"""The status of a final response, its headers and its body."""

PlainInterim = tuple[HeaderFields, bytes]
"""The headers of an interim response, and the bytes that follow it."""


def read_none(data: bytes) -> None:
    """Read nothing: without the function in C, the parser is the fastest."""
    return


plain_request: Callable[[bytes], PlainRequest | None] = read_none
plain_response: Callable[[bytes], PlainResponse | None] = read_none
plain_interim: Callable[[bytes], PlainInterim | None] = read_none

with suppress(ImportError):
    _IN_C = importlib.import_module("router.dataplane.head_bytes")
    plain_request, plain_response = _IN_C.plain_request, _IN_C.plain_response
    plain_interim = _IN_C.plain_interim
