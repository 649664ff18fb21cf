"""HTTP/1.1 as this router reads and writes it: what a request is, and how heads look. Pure.

Nothing of a client's head is ever passed on: what goes to a node is written anew, with a length of
our own counting. A request that two parsers could read in two ways is refused (RFC 9112, 6.3).
"""

from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Final, TypeAlias

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode

Fields: TypeAlias = dict[bytes, bytes]
"""The headers of a head, names in lower case; a dict, which compiled code looks into directly."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
METHODS: Final = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
ENCODINGS: Final = frozenset({b"", b"identity", b"gzip", b"deflate"})
EVENT_STREAM: Final = "text/event-stream"

_USUAL: Final = (
    b"accept", b"accept-encoding", b"authorization", b"connection", b"content-length",
    b"content-type", b"date", b"host", b"server", b"transfer-encoding", b"user-agent",
    b"x-request-id", headers.LOAD.encode(),
)  # fmt: skip
_NAMES: Final = {spelled: name for name in _USUAL for spelled in (name, name.title())}
_ONCE: Final = frozenset({b"authorization", b"content-encoding", b"content-type", b"host"})
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {phrase}\r\n" for status, phrase in _REASONS.items()
}


def lower(name: bytes) -> bytes:
    """Return a header's name in lower case."""
    return _NAMES.get(name) or name.lower()


def joined(name: bytes, before: bytes, value: bytes) -> bytes:
    """Return a repeated header's value, or raise ApiError where repeating makes it ambiguous."""
    if name in _ONCE:
        raise malformed(f"more than one {name.decode('latin-1')} header")
    return before + b", " + value


def check_head(method: bytes, version: str, fields: Fields) -> None:
    """Raise ApiError where a head is one that the parser lets through and we do not."""
    if version not in ("1.1", "1.0"):
        raise malformed(f"HTTP/{version} is not spoken here, send HTTP/1.1")
    if method not in METHODS:
        raise ApiError(
            ErrorCode.METHOD_NOT_ALLOWED,
            f"cannot serve: {method.decode('latin-1')} is not taken here",
        )
    if version == "1.1" and not fields.get(b"host"):
        raise malformed("no Host header")
    coding = fields.get(b"transfer-encoding")
    if coding is not None and (version == "1.0" or coding.lower() != b"chunked"):
        raise malformed("a Transfer-Encoding other than chunked, or in HTTP/1.0")
    expect = fields.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise malformed("only 100-continue may be expected")
    if fields.get(b"content-encoding", b"").lower() not in ENCODINGS:
        raise malformed("only gzip and deflate bodies are read")


@lru_cache(maxsize=64)
def split_target(target: bytes) -> tuple[str, str]:
    """Return path and query of a request target, also of one in absolute form (RFC 9112, 3.2)."""
    text = target.decode("latin-1")
    if not text.startswith("/"):
        _, separator, rest = text.partition("://")
        if not separator:
            raise malformed("the request target is no path")
        text = "/" + rest.partition("/")[2]
    path, _, query = text.partition("?")
    return path, query


def malformed(what: str) -> ApiError:
    """Return the error for what is not HTTP as we take it."""
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve: malformed HTTP ({what})")


def lines_of(fields: Mapping[str, str]) -> str:
    """Write headers as the lines that go over the wire."""
    return "".join([f"{name}: {value}\r\n" for name, value in fields.items()])


def opening(status: int, content_type: str, date: str) -> str:
    """Write what answers of a kind have in common: their first lines."""
    first = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{first}content-type: {content_type}\r\ndate: {date}\r\n"


def response_head(
    first: str, lines: str, *, length: int | None, keep_alive: bool, chunked: bool
) -> bytes:
    """Write an answer's head after its opening: of `length` bytes, chunked, or ended by closing."""
    end = "\r\n" if keep_alive else "connection: close\r\n\r\n"
    if length is not None:
        head = f"{first}{lines}content-length: {length}\r\n{end}"
    elif chunked:
        head = f"{first}{lines}transfer-encoding: chunked\r\n{end}"
    else:
        head = first + lines + end
    return head.encode("latin-1", "replace")


def request_head(method: str, path: str, host: str, lines: str, length: int) -> bytes:
    """Write the head of a request to a node."""
    if length or method != "GET":
        lines = f"{lines}content-length: {length}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{lines}\r\n"
    return head.encode("latin-1", "replace")
