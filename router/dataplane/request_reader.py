"""Requests off the wire: bytes in, whole and checked requests out. No transport, no tasks.

What two parsers could read in two ways is refused here (RFC 9112, 6.3), and everything is bounded:
the head while it grows, the body before and while it comes, and what it inflates to.
"""

import zlib
from collections.abc import Callable
from typing import Final, Protocol

import httptools

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.routes import KeyEntry
from router.dataplane import http1
from router.dataplane.http_messages import HttpRequest

HEAD_BYTES_MAX: Final = 32 * 1024
KEYLESS_BODY_BYTES_MAX: Final = 64 * 1024
"""Of those who need show no key: no route that is open to all has use for a body."""

LetIn = Callable[[bytes, str, http1.Fields], KeyEntry | None]
"""Method, path and headers to whose request it is; raises ApiError before a body is read."""


class RequestReceiver(Protocol):
    """Who hears of what was read."""

    def continue_is_expected(self) -> None:
        """A head was read and let in whose body comes only when it is asked for."""

    def request_is_whole(self, request: HttpRequest) -> None:
        """A request was read to its end."""


class RequestReader:
    """Reads the requests of one connection, one after the other."""

    __slots__ = (
        "_body", "_body_bytes", "_body_bytes_max", "_bytes_max", "_clock", "_fields_bytes",
        "_held_bytes", "_ignores_head", "_length", "_let_in", "_owner", "_parser", "_request",
        "_target", "_whole",
    )  # fmt: skip

    def __init__(
        self, owner: RequestReceiver, let_in: LetIn, bytes_max: int, clock: Callable[[], float]
    ) -> None:
        """Take bodies of at most `bytes_max`. `clock` gives monotonic seconds."""
        self._owner = owner
        self._let_in = let_in
        self._bytes_max = self._body_bytes_max = bytes_max
        self._clock = clock
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_head = False
        self._whole = 0
        # The request being read; `_length` is None as long as its head is.
        self._request: HttpRequest
        self._length: int | None
        self._body: list[bytes]
        self._forget()

    @property
    def arrived_s(self) -> float:
        """When the request being read began, in monotonic seconds; 0 between requests."""
        return self._request.arrived_s

    @property
    def is_in_body(self) -> bool:
        """Whether a head is whole and its body is not."""
        return self._length is not None

    @property
    def path(self) -> str:
        """The path of the request being read, as far as it came; empty between requests."""
        return self._target.partition(b"?")[0].decode("latin-1")

    def feed(self, data: bytes) -> None:
        """Read what came, or raise ApiError saying what is wrong with it."""
        whole, body_bytes = self._whole, self._body_bytes
        try:
            self._parse(data)
        except httptools.HttpParserCallbackError as error:
            # Our own refusals come through the parser wrapped.
            cause = error.__context__
            if isinstance(cause, ApiError):
                raise cause from None
            raise http1.malformed("a broken head") from None
        except httptools.HttpParserError as error:
            raise http1.malformed(str(error)[:120]) from None
        if whole == self._whole and body_bytes == self._body_bytes:
            # The parser holds a header back until it is whole, and a trailer too: what it holds is
            # bounded here.
            self._held_bytes += len(data)
            if self._held_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])

    # The parser's side.

    def on_message_begin(self) -> None:
        """Begin a request: its head has its deadline from here."""
        if not self._ignores_head:
            self._request.arrived_s = self._clock()

    def on_url(self, url: bytes) -> None:
        """Take the request target, or a part of it."""
        if not self._ignores_head:
            self._fields_bytes += len(url)
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; a trailer, which comes after the head, is dropped."""
        if self._length is None and not self._ignores_head:
            self._fields_bytes += len(name) + len(value) + 4
            if self._fields_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()
            headers, name = self._request.headers, http1.lower(name)
            if name in headers:
                value = http1.joined(name, headers[name], value)
            headers[name] = value

    def on_headers_complete(self) -> None:
        """Check the head, before a byte of the body is waited for."""
        if self._ignores_head:
            return
        request, version = self._request, self._parser.get_http_version()
        headers = request.headers
        request.method = self._parser.get_method()
        http1.check_head(request.method, version, headers)
        request.is_http10 = version == "1.0"
        request.path, request.query = http1.split_target(self._target)
        request.key = self._let_in(request.method, request.path, headers)
        self._body_bytes_max = self._bytes_max
        if request.key is None and self._bytes_max > KEYLESS_BODY_BYTES_MAX:
            self._body_bytes_max = KEYLESS_BODY_BYTES_MAX
        length = int(headers.get(b"content-length", b"0"))
        if length > self._body_bytes_max:
            raise self._too_large()
        self._length = length
        if b"expect" in headers:
            self._owner.continue_is_expected()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_bytes += len(body)
        self._held_bytes = 0
        if self._body_bytes > self._body_bytes_max:
            raise self._too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Hand a whole request on."""
        parser = self._parser
        if parser.should_upgrade():
            # Not the message's end, only where the parser stops: see `_go_on_without_upgrade`.
            return
        request = self._request
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if b"content-encoding" in request.headers:
            encoding = request.headers[b"content-encoding"].lower()
            request.body = self._inflated(request.body, encoding)
        request.keep_alive = parser.should_keep_alive()
        self._whole += 1
        self._forget()
        self._owner.request_is_whole(request)

    def _forget(self) -> None:
        self._request = HttpRequest()
        self._target = b""
        self._body = []
        self._body_bytes = 0
        self._fields_bytes = 0
        self._held_bytes = 0
        self._length = None

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Ignore a wish for another protocol, as RFC 9110 (7.8) allows: parse on as HTTP/1.1.

        The parser stops at the head's end; a fresh one is given a head that says only how the body
        is framed.
        """
        request = self._request
        if request.method == b"CONNECT":
            raise http1.malformed("this is no forward proxy")
        framing = b"".join(
            [
                name + b": " + request.headers[name] + b"\r\n"
                for name in (b"content-length", b"transfer-encoding")
                if name in request.headers
            ]
        )
        wishes = request.headers.get(b"connection", b"").lower().split(b",")
        for wish in (b"close", b"keep-alive"):
            if wish in [one.strip() for one in wishes]:
                framing += b"connection: " + wish + b"\r\n"
        version = b"1.0" if request.is_http10 else b"1.1"
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_head = True
        self._parser.feed_data(request.method + b" / HTTP/" + version + b"\r\n" + framing + b"\r\n")
        self._ignores_head = False
        if rest:
            self._parse(rest)

    def _inflated(self, body: bytes, encoding: bytes) -> bytes:
        """Return the body decompressed, its size bounded as if it had come plain."""
        if encoding in (b"", b"identity"):
            return body
        bytes_max = self._body_bytes_max
        inflater = zlib.decompressobj(wbits=31 if encoding == b"gzip" else 15)
        try:
            whole = inflater.decompress(body, bytes_max + 1)
        except zlib.error:
            raise http1.malformed(f"a body that is not {encoding.decode()}") from None
        if len(whole) > bytes_max:
            raise self._too_large()
        if not inflater.eof or inflater.unused_data:
            raise http1.malformed(f"a {encoding.decode()} body cut short")
        return whole

    def _too_large(self) -> ApiError:
        return ApiError(
            ErrorCode.TOO_LARGE,
            f"cannot read the body: more than the {self._body_bytes_max} bytes allowed",
        )


def _head_too_large() -> ApiError:
    return http1.malformed(f"a head or trailer of more than {HEAD_BYTES_MAX} bytes")
