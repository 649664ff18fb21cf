"""HTTP/1.1 rules of this router: which request heads are accepted, and how heads are written. Pure.

No header line of a client reaches a node: requests to nodes get a new head with a length computed
here. A request that two parsers could read in different ways is refused (RFC 9112, 6.3).
"""

from collections.abc import Callable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, TypeAlias

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers

HeaderFields: TypeAlias = dict[bytes, bytes]
"""Headers by lower-case name. A plain dict, because compiled code accesses it directly."""

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
METHODS: Final = frozenset(
    {b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE"}
)
"""Each path refuses those that it does not have."""

ENCODINGS: Final = frozenset({b"", b"identity", b"gzip", b"deflate"})
EVENT_STREAM: Final = "text/event-stream"

SMALL_BODY_BYTES: Final = 64 * 1024
"""Reading and parsing a body of this size costs less than a new connection."""

_COMMON_NAMES: Final = (
    b"accept", b"accept-encoding", b"authorization", b"connection", b"content-length",
    b"content-type", b"date", b"host", b"server", b"transfer-encoding", b"user-agent",
    b"x-request-id", headers.LOAD.encode(),
)  # fmt: skip
_LOWER_NAMES: Final = {
    spelling: name for name in _COMMON_NAMES for spelling in (name, name.title())
}
_SINGLE_VALUED: Final = frozenset({b"authorization", b"content-encoding", b"content-type", b"host"})
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {phrase}\r\n" for status, phrase in _REASONS.items()
}


def lower_name(name: bytes) -> bytes:
    """Return a header name in lower case."""
    return _LOWER_NAMES.get(name) or name.lower()


def join_repeated(name: bytes, earlier: bytes, value: bytes) -> bytes:
    """Return the joined value of a repeated header.

    Raises ApiError 400 if the header may appear only once.
    """
    if name in _SINGLE_VALUED:
        raise malformed(f"the header {name.decode('latin-1')} appears more than once")
    return earlier + b", " + value


def check_head(method: bytes, version: str, fields: HeaderFields) -> None:
    """Raise ApiError if the parser accepts a head that this router does not."""
    if version not in ("1.1", "1.0"):
        raise malformed(f"HTTP/{version} is not supported, use HTTP/1.1")
    if method not in METHODS:
        raise ApiError(
            ErrorCode.METHOD_NOT_ALLOWED,
            f"cannot use the method {method.decode('latin-1')}: use GET, POST or DELETE",
            headers={"allow": "GET, POST, DELETE, OPTIONS"},
        )
    if version == "1.1" and not fields.get(b"host"):
        raise malformed("the Host header is missing")
    coding = fields.get(b"transfer-encoding")
    if coding is not None and (version == "1.0" or coding.lower() != b"chunked"):
        raise malformed("Transfer-Encoding may only be 'chunked', and only with HTTP/1.1")
    expect = fields.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise malformed("Expect may only be '100-continue'")
    if fields.get(b"content-encoding", b"").lower() not in ENCODINGS:
        raise malformed("Content-Encoding may only be 'gzip', 'deflate' or 'identity'")


def is_costly_body(fields: HeaderFields) -> bool:
    """Return whether a body is compressed, or may have more than SMALL_BODY_BYTES."""
    if (
        b"transfer-encoding" in fields
        or fields.get(b"content-encoding", b"identity") != b"identity"
    ):
        return True
    length = fields.get(b"content-length", b"0")
    # Four digits are few bytes.
    return len(length) > 4 and int(length) > SMALL_BODY_BYTES


@lru_cache(maxsize=64)
def split_target(target: bytes) -> tuple[str, str]:
    """Return the path and the query of a request target, also in absolute form (RFC 9112, 3.2)."""
    text = target.decode("latin-1")
    if not text.startswith("/"):
        _, separator, rest = text.partition("://")
        if not separator:
            raise malformed("the request target is not a path")
        text = "/" + rest.partition("/")[2]
    path, _, query = text.partition("?")
    return path, query


def malformed(reason: str) -> ApiError:
    """Return the error 400 for bytes that are not an acceptable HTTP request."""
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot read the HTTP request: {reason}")


def format_headers(fields: Mapping[str, str]) -> str:
    """Return headers as the lines that are written to the wire."""
    return "".join([f"{name}: {value}\r\n" for name, value in fields.items()])


def response_opening(status: int, content_type: str, date: str) -> str:
    """Return the first lines of a response, which responses of one kind share."""
    status_line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{status_line}content-type: {content_type}\r\ndate: {date}\r\n"


def cors_lines(origin: str) -> str:
    """Return the header lines that let web pages of `origin` read a response; none for "".

    Without `access-control-allow-credentials`, a browser sends no cookies and no stored password.
    """
    if not origin:
        return ""
    return f"access-control-allow-origin: {origin}\r\naccess-control-expose-headers: *\r\n"


class ResponseOpenings:
    """The first lines of this router's responses, with the date."""

    def __init__(self, cors_origin: str, unix_clock: Callable[[], float]) -> None:
        """Let web pages of `cors_origin` read responses."""
        self._cors_lines = cors_lines(cors_origin)
        self._unix_clock = unix_clock
        self._openings: dict[tuple[int, str], str] = {}
        self._second = 0

    def of(self, status: int, content_type: str) -> str:
        """Return the first lines of a response; cached for one second."""
        second = int(self._unix_clock())
        if second != self._second:
            self._second = second
            self._openings.clear()
        kind = (status, content_type)
        opening = self._openings.get(kind)
        if opening is None:
            opening = response_opening(status, content_type, formatdate(second, usegmt=True))
            opening = self._openings[kind] = opening + self._cors_lines
        return opening


def response_head(
    opening: str, header_lines: str, *, length: int | None, keep_alive: bool, chunked: bool
) -> bytes:
    """Return a response head. The body has `length` bytes, is chunked, or ends with the connection.

    `opening` comes from `response_opening`.
    """
    end = "\r\n" if keep_alive else "connection: close\r\n\r\n"
    if length is not None:
        head = f"{opening}{header_lines}content-length: {length}\r\n{end}"
    elif chunked:
        head = f"{opening}{header_lines}transfer-encoding: chunked\r\n{end}"
    else:
        head = opening + header_lines + end
    return head.encode("latin-1", "replace")


def request_head(method: str, path: str, host: str, header_lines: str, length: int) -> bytes:
    """Return the head of a request to a node, with a body of `length` bytes."""
    if length or method != "GET":
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{header_lines}"
            f"content-length: {length}\r\n\r\n"
        )
    else:
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{header_lines}\r\n"
    return head.encode("latin-1", "replace")
