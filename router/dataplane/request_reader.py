"""Reads client requests: bytes in, complete and checked requests out. No transport and no tasks.

A request that two parsers could read in different ways is refused (RFC 9112, 6.3). Every size has
a limit: the head while it grows, and the body before and while it arrives. Compressed bodies are
passed on as they are.
"""

from collections.abc import Callable
from typing import Final, Protocol

import httptools

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import KeyEntry
from router.dataplane import http1
from router.dataplane.body_admission import KEYLESS_BODY_BYTES_MAX
from router.dataplane.body_receiver import BodyBuffer, open_buffer
from router.dataplane.http_messages import HttpRequest, UploadedBody
from router.dataplane.plain_messages import plain_request

HEAD_BYTES_MAX: Final = 32 * 1024
HEAD_FIELDS_MAX: Final = 128
"""A field of a few bytes takes hundreds in memory, for anyone who leaves a head unfinished."""

UNPARSED_BYTES_MIN: Final = 64 * 1024
"""From this size on the rest of a body of known length is only counted: a parser would copy it."""

REQUESTS_AT_ONCE_MAX: Final = 64
"""More requests in what is read at once are refused: it may hold thousands, which would all be read
and answered before another connection has its turn."""

LARGE_PART_BYTES: Final = 16 * 1024
"""Smaller parts of a body are collected in one buffer: many must not cost an object each."""

# Looked up once, because each request uses it.
_PLAIN_REQUEST: Final = plain_request
_OPEN_BUFFER: Final = open_buffer

Authorize = Callable[[bytes, str, http1.HeaderFields], KeyEntry | None]
"""(method, path, headers) to the request's API key; raises ApiError before the body is read."""


OpenUpload = Callable[[HttpRequest], UploadedBody | None]
"""An authorized head to where its body is kept, if that is not memory; raises ApiError."""


class RequestReceiver(Protocol):
    """Receives the requests of a RequestReader."""

    def on_continue_expected(self) -> None:
        """Handle an authorized head with `Expect: 100-continue`: the client waits for a 100."""

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        """Count `count` bytes of an unfinished body. Raises ApiError to refuse the request."""

    def on_request(self, request: HttpRequest) -> None:
        """Handle a complete request."""


class NoReceiver:
    """Receives nothing."""

    def on_continue_expected(self) -> None:
        """Do nothing."""

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        """Do nothing."""

    def on_request(self, request: HttpRequest) -> None:
        """Do nothing."""


NO_PARSER: Final = httptools.HttpRequestParser(object())
NO_RECEIVER: Final = NoReceiver()
"""The parser of a reader whose connection is closed."""


class RequestReader:
    """Reads the requests of one connection, one after the other."""

    __slots__ = (
        "_authorize", "_body_bytes", "_body_bytes_max", "_bytes_max", "_clock", "_counts_rest",
        "_fields", "_fields_bytes", "_first_part", "_ignores_head", "_is_last", "_length",
        "_open_upload", "_other_parts", "_parser", "_receiver", "_request", "_requests_max",
        "_requests_read", "_target", "_unparsed_bytes", "_unparsed_bytes_min", "buffer",
    )  # fmt: skip

    def __init__(
        self,
        receiver: RequestReceiver,
        authorize: Authorize,
        open_upload: OpenUpload,
        bytes_max: int,
        clock: Callable[[], float],
        unparsed_bytes_min: int = UNPARSED_BYTES_MIN,
    ) -> None:
        """Accept bodies of at most `bytes_max` bytes. `clock` returns monotonic seconds.

        The parser does not get the rest of a body if that has `unparsed_bytes_min` bytes or more.
        """
        self._receiver: RequestReceiver = receiver
        self._authorize = authorize
        self._open_upload = open_upload
        self._bytes_max = self._body_bytes_max = bytes_max
        self._clock = clock
        self._unparsed_bytes_min = unparsed_bytes_min
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_head = False
        self._is_last = False
        """Whether the last request closes the connection: its parser refuses what follows."""
        self._requests_read = self._requests_max = 0
        # The request being read; `_length` is None until its head is complete.
        self._request: HttpRequest
        self._length: int | None
        self._body_bytes: int
        self._counts_rest: bool
        self._first_part: bytes
        self._other_parts: list[bytes | bytearray]
        self.buffer: BodyBuffer | None
        """Where the body being read is; None if it is small, or its length is not known."""
        self._reset()

    @property
    def arrived_s(self) -> float:
        """The monotonic time at which the request being read began; 0 between requests."""
        return self._request.arrived_s

    @property
    def is_in_body(self) -> bool:
        """Whether the head is complete and the body is not."""
        return self._length is not None

    @property
    def uploaded_bytes(self) -> int:
        """How much of a body that is kept on disk has arrived."""
        return self._body_bytes if self._request.upload is not None else 0

    def give_up(self) -> HttpRequest:
        """Drop the body received so far; return the unfinished request, as far as it arrived."""
        self._first_part, self._other_parts, self.buffer = b"", [], None
        request = self._request
        request.path = self._target.partition(b"?")[0].decode("latin-1")
        return request

    def close(self) -> HttpRequest:
        """Give up, and read no more.

        A reader, its parser and its receiver hold each other: only the garbage collector would free
        them.
        """
        self._parser, self._receiver = NO_PARSER, NO_RECEIVER
        return self.give_up()

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Raises ApiError if they are not an acceptable request.

        `data` is empty after bytes were read into `buffer`.
        """
        self._requests_max = self._requests_read + REQUESTS_AT_ONCE_MAX
        if self._counts_rest:
            data = self._count_rest(data)
            if not data:
                return
        if self._read_plain(data):
            return
        requests_read, body_bytes = self._requests_read, self._body_bytes
        try:
            self._parse(data)
        except httptools.HttpParserCallbackError as error:
            # The parser wraps the ApiErrors that our callbacks raise.
            cause = error.__context__
            if isinstance(cause, ApiError):
                raise cause from None
            raise http1.malformed("the head is malformed") from None
        except httptools.HttpParserError as error:
            raise http1.malformed(str(error)[:120]) from None
        if requests_read == self._requests_read and body_bytes == self._body_bytes:
            # The parser buffers an incomplete header or trailer itself: this limits that buffer.
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()
        if self._length is not None and self._length - self._body_bytes >= self._unparsed_bytes_min:
            # The parser itself refuses bytes after a request that closes the connection.
            parser = self._parser
            self._counts_rest = parser.should_keep_alive() and not parser.should_upgrade()
            if self._counts_rest and _OPEN_BUFFER is not None and self._request.upload is None:
                self.buffer = _OPEN_BUFFER(self._length)
                self.buffer.add(self._joined())
                self._first_part, self._other_parts = b"", []

    def _read_plain(self, data: bytes) -> bool:
        """Read a whole plain request, and return True; False if the parser must read `data`."""
        request = self._request
        if request.arrived_s or self._is_last:
            return False
        plain = _PLAIN_REQUEST(data)
        if plain is None:
            return False
        request.arrived_s = self._clock()
        self._target, request.headers, body = plain
        self._accept_head(b"POST", "1.1")
        if body:
            self.on_body(body)
        self._complete(keep_alive=True)
        return True

    def _count_rest(self, data: bytes) -> bytes:
        """Take the rest of a body of known length; return what follows it. Raises ApiError."""
        assert self._length is not None
        missing = self._length - self._body_bytes
        if data:
            self.on_body(data if len(data) <= missing else data[:missing])
        elif self.buffer is not None:
            before = self._body_bytes
            self._body_bytes = self.buffer.count
            self._hold(before)
        if self._body_bytes < self._length:
            return b""
        self._parser = httptools.HttpRequestParser(self)
        self._complete(keep_alive=True)
        return data[missing:]

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._continue_without_upgrade(data[upgrade.args[0] :])

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Start a request: the deadline of its head counts from here."""
        if not self._ignores_head:
            self._request.arrived_s = self._clock()

    def on_url(self, url: bytes) -> None:
        """Append a part of the request target."""
        if not self._ignores_head:
            self._fields_bytes += len(url)
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add one header. A trailer, which follows the body, is dropped."""
        if self._length is None and not self._ignores_head:
            self._fields += 1
            self._fields_bytes += len(name) + len(value) + 4
            if self._fields_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()
            if self._fields > HEAD_FIELDS_MAX:
                raise http1.malformed(f"the head has more than {HEAD_FIELDS_MAX} fields")
            headers, name = self._request.headers, http1.lower_name(name)
            if name in headers:
                value = http1.join_repeated(name, headers[name], value)
            headers[name] = value

    def on_headers_complete(self) -> None:
        """Check and authorize the head before any of the body is awaited."""
        if self._ignores_head:
            return
        headers, version = self._request.headers, "1.1"
        is_named = b"connection" in headers or b"proxy-connection" in headers
        if is_named or not self._parser.should_keep_alive():
            # Any other version keeps a connection only with these. Asking the parser costs more.
            version = self._parser.get_http_version()
        self._accept_head(self._parser.get_method(), version)

    def _accept_head(self, method: bytes, version: str) -> None:
        """Check and authorize a head whose target and headers are read."""
        request, headers = self._request, self._request.headers
        request.method = method
        http1.check_head(method, version, headers)
        request.is_http10 = version == "1.0"
        request.path, request.query = http1.split_target(self._target)
        request.key = self._authorize(request.method, request.path, headers)
        self._body_bytes_max = self._bytes_max
        if request.key is None and self._bytes_max > KEYLESS_BODY_BYTES_MAX:
            self._body_bytes_max = KEYLESS_BODY_BYTES_MAX
        upload = request.upload = self._open_upload(request)
        if upload is not None:
            self._body_bytes_max = upload.bytes_max
        length = int(headers.get(b"content-length", b"0"))
        if length > self._body_bytes_max:
            raise self._body_too_large()
        self._length = length
        if b"expect" in headers:
            self._receiver.on_continue_expected()

    def on_body(self, body: bytes) -> None:
        """Append a part of the body."""
        before = self._body_bytes
        self._body_bytes += len(body)
        self._unparsed_bytes = 0
        if self._body_bytes > self._body_bytes_max:
            raise self._body_too_large()
        upload = self._request.upload
        if upload is not None:
            upload.write(body)
            return
        self._hold(before)
        if self.buffer is not None:
            self.buffer.add(body)
        elif not before:
            self._first_part = body
        elif len(body) >= LARGE_PART_BYTES:
            self._other_parts.append(body)
        elif self._other_parts and isinstance(self._other_parts[-1], bytearray):
            self._other_parts[-1] += body
        else:
            self._other_parts.append(bytearray(body))

    def on_message_complete(self) -> None:
        """Pass the complete request to the receiver."""
        parser = self._parser
        if parser.should_upgrade():
            # The parser only stopped at the head: `_continue_without_upgrade` reads the rest.
            return
        self._complete(keep_alive=parser.should_keep_alive())

    def _complete(self, *, keep_alive: bool) -> None:
        request = self._request
        request.body = self._joined() if self.buffer is None else self.buffer.take()
        request.keep_alive = keep_alive
        self._is_last = not keep_alive
        if self._requests_read == self._requests_max:
            most = f"more than {REQUESTS_AT_ONCE_MAX} requests arrive at once"
            raise http1.malformed(f"{most}: wait for answers")
        self._requests_read += 1
        self._reset()
        self._receiver.on_request(request)

    def _hold(self, before: int) -> None:
        """Count what has come; a body that arrives whole, as most do, is not held."""
        if self._body_bytes != self._length or before:
            self._receiver.on_body_held(self._request, self._body_bytes - before)

    def _joined(self) -> bytes:
        """Return the parts of the body as one."""
        if not self._other_parts:
            return self._first_part
        return b"".join([self._first_part, *self._other_parts])

    def _reset(self) -> None:
        """Prepare for the next request of the connection."""
        self._request = HttpRequest()
        self._target = b""
        self._counts_rest = False
        self._first_part, self._other_parts, self.buffer = b"", [], None
        self._body_bytes = 0
        self._fields = self._fields_bytes = 0
        self._unparsed_bytes = 0
        self._length = None

    def _continue_without_upgrade(self, rest: bytes) -> None:
        """Ignore an `Upgrade` header, as RFC 9110 (7.8) allows, and parse `rest` as HTTP/1.1.

        The parser stops at the end of the head. A new parser continues after an artificial head
        that only says how the body is framed.
        """
        request = self._request
        if request.method == b"CONNECT":
            raise http1.malformed("CONNECT is not supported: this is not a forward proxy")
        framing = b"".join(
            [
                name + b": " + request.headers[name] + b"\r\n"
                for name in (b"content-length", b"transfer-encoding")
                if name in request.headers
            ]
        )
        options = [
            option.strip() for option in request.headers.get(b"connection", b"").lower().split(b",")
        ]
        for option in (b"close", b"keep-alive"):
            if option in options:
                framing += b"connection: " + option + b"\r\n"
        version = b"1.0" if request.is_http10 else b"1.1"
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_head = True
        self._parser.feed_data(request.method + b" / HTTP/" + version + b"\r\n" + framing + b"\r\n")
        self._ignores_head = False
        if rest:
            self._parse(rest)

    def _body_too_large(self) -> ApiError:
        return ApiError(
            ErrorCode.TOO_LARGE,
            f"cannot read the body: it has more than the allowed {self._body_bytes_max} bytes",
        )


def _head_too_large() -> ApiError:
    return http1.malformed(f"the head or trailer has more than {HEAD_BYTES_MAX} bytes")
