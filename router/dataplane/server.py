"""The public listener on raw transports: one connection, its requests in order, its answers.

Rule 1: a request is handed on whole and checked; what is malformed is answered here and closed.
Rule 2: one request of a connection is answered at a time; those that follow wait, unread.
Rule 3: a client that is gone cancels its request; one that does not read stops what it reads from.
"""

import asyncio
import logging
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from typing import Final, Protocol, cast

import httptools

from isochrone.service.door import DoorLimits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.routes import KeyEntry
from router.dataplane import http1
from router.dataplane.deadlines import NEVER, Deadlines
from router.dataplane.http1 import Reply, Request

log = logging.getLogger(__name__)

HEAD_BYTES_MAX: Final = 32 * 1024
READY_MAX: Final = 4
"""Whole requests of one connection that wait for the one before; past it nothing more is read."""

WRITE_BUFFER_BYTES: Final = 64 * 1024
LINGER_S: Final = 1.0


class Source(Protocol):
    """Whence an answer flows: it stops while the client reads slower."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None:
        """Read on."""


Handler = Callable[[Request, "ClientConnection"], Awaitable[None]]
EncodeError = Callable[[ApiError], Reply]
Gate = Callable[[bytes, bytes, Mapping[bytes, bytes]], KeyEntry | None]
"""Method, target and headers to whose request it is; raises ApiError before a body is read."""


class Server:
    """What all connections of a listener share, and how many they are."""

    def __init__(
        self,
        *,
        limits: DoorLimits,
        write_timeout_s: float,
        gate: Gate,
        handler: Handler,
        encode_error: EncodeError,
        deadlines: Deadlines,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        """Answer each request by `handler`; errors below it are written by `encode_error`."""
        self.limits = limits
        self.write_timeout_s = write_timeout_s
        self.gate = gate
        self.handler = handler
        self.encode_error = encode_error
        self.deadlines = deadlines
        self.clock = clock
        self.is_draining = False
        self.connections: set[ClientConnection] = set()
        self.by_address: Counter[str] = Counter()
        self._unix_clock = unix_clock
        self._gone = asyncio.Event()
        self._date = ""
        self._date_of = 0

    def date(self) -> str:
        """Return the `date` header's value, written once a second."""
        second = int(self._unix_clock())
        if second != self._date_of:
            self._date_of = second
            self._date = formatdate(second, usegmt=True)
        return self._date

    def connection(self) -> "ClientConnection":
        """Make the protocol of one connection; for `create_server`."""
        return ClientConnection(self)

    async def drain(self, timeout_s: float) -> None:
        """Let requests end, each connection closing after its own; cut what takes longer."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_gone()
        for connection in list(self.connections):
            connection.abort()
        await self._all_gone()

    def came(self, connection: "ClientConnection", address: str) -> bool:
        """Count a connection in; False where it is one too many."""
        self.connections.add(connection)
        self.by_address[address] += 1
        self.deadlines.add(connection)
        return not (
            self.is_draining
            or len(self.connections) > self.limits.connections_max
            or self.by_address[address] > self.limits.connections_per_address_max
        )

    def went(self, connection: "ClientConnection", address: str) -> None:
        """Count a connection out."""
        self.connections.discard(connection)
        self.deadlines.discard(connection)
        self.by_address[address] -= 1
        if self.by_address[address] <= 0:
            del self.by_address[address]
        if not self.connections:
            self._gone.set()

    async def _all_gone(self) -> None:
        while self.connections:
            self._gone.clear()
            await self._gone.wait()


class ClientConnection(asyncio.Protocol):
    """One client's connection. It is also the writer that a request's answer goes to."""

    __slots__ = (
        "_address", "_arrived_s", "_bad", "_begun", "_body", "_body_bytes", "_chunked",
        "_fields_bytes", "_head_bytes", "_headers", "_ignores_head", "_is_http10", "_key",
        "_length", "_method", "_parser", "_paused", "_ready", "_request", "_resumed", "_server",
        "_source", "_stopped_reading", "_target", "_task", "_transport", "_whole", "due_s",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._ready: deque[Request] = deque()
        self._bad: ApiError | None = None
        self._source: Source | None = None
        self._address = ""
        self._paused = False
        self._stopped_reading = False
        self._request: Request | None = None
        self._begun = False
        self._chunked = False
        self._resumed: asyncio.Future[None] | None = None
        self._ignores_head = False
        self._whole = 0
        self.due_s = NEVER
        # The request being read; `_length` is None as long as its head is.
        self._length: int | None
        self._headers: dict[bytes, bytes]
        self._body: list[bytes]
        self._key: KeyEntry | None
        self._forget_request()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it, and wait for its first head."""
        server = self._server
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) and peer else "unix"
        if not server.came(self, self._address):
            self._transport.abort()
            return
        self.due_s = server.clock() + server.limits.head_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; whatever still works for it is cancelled."""
        self._server.went(self, self._address)
        self._transport = None
        self._ready.clear()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Take the end of what a client sends for its leaving, as proxies do."""
        return False

    def data_received(self, data: bytes) -> None:
        """Parse what came; whole requests begin, what is malformed ends the connection."""
        if self._bad is not None:
            return
        is_in_head, whole = self._length is None, self._whole
        try:
            self._parser.feed_data(data)
            if is_in_head and self._length is None and whole == self._whole:
                # The parser holds a header back until it is whole: what it holds is bounded here.
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES_MAX:
                    raise http1.malformed(f"a head of more than {HEAD_BYTES_MAX} bytes")
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            # Our own refusals come through the parser wrapped.
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else http1.malformed("a broken head"))
        except httptools.HttpParserError as error:
            self._refuse(http1.malformed(str(error)[:120]))
        except ApiError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        """Stop the source of what is written: the client reads slower."""
        self._paused = True
        self.due_s = self._server.clock() + self._server.write_timeout_s
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        """Let the source flow again."""
        self._paused = False
        self.due_s = NEVER
        if self._source is not None:
            self._source.resume()
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    def on_due(self) -> None:
        """End what waited too long: a head, a body, an idle connection, a client that is deaf."""
        if self._task is not None or self._bad is not None:
            self.abort()
        elif self._arrived_s:
            waited_s = self._server.clock() - self._arrived_s
            what = "head" if self._length is None else "body"
            self._refuse(
                ApiError(
                    ErrorCode.REQUEST_TIMEOUT,
                    f"cannot read the {what}: not whole after {waited_s:.1f} s",
                )
            )
        elif self._transport is not None:
            self._transport.close()

    # The parser's side.

    def on_message_begin(self) -> None:
        """Begin a request: its head has its deadline from here."""
        if not self._ignores_head:
            self._arrived_s = self._server.clock()
            if self._task is None:
                self.due_s = self._arrived_s + self._server.limits.head_timeout_s

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
                raise http1.malformed(f"a head of more than {HEAD_BYTES_MAX} bytes")
            http1.add_header(self._headers, name, value)

    def on_headers_complete(self) -> None:
        """Check the head, before a byte of the body is waited for."""
        if self._ignores_head:
            return
        parser, headers, server = self._parser, self._headers, self._server
        self._method = parser.get_method()
        version = parser.get_http_version()
        http1.check_head(self._method, version, headers)
        self._is_http10 = version == "1.0"
        self._key = server.gate(self._method, self._target, headers)
        length = int(headers.get(b"content-length", b"0"))
        self._length = length
        if length > server.limits.body_bytes_max:
            raise self._too_large()
        self.due_s = server.clock() + server.limits.body_timeout_s
        if b"expect" in headers and self._task is None and self._transport is not None:
            self._transport.write(http1.CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._server.limits.body_bytes_max:
            raise self._too_large()
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Hand a whole request on."""
        parser = self._parser
        if parser.should_upgrade():
            # Not the message's end, only where the parser stops: see `_go_on_without_upgrade`.
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        encoding = self._headers.get(b"content-encoding", b"").lower()
        if encoding not in (b"", b"identity"):
            body = self._inflated(body, encoding)
        path, query = http1.split_target(self._target)
        self._ready.append(
            Request(
                self._method,
                path,
                query,
                self._headers,
                body,
                parser.should_keep_alive() and not self._server.is_draining,
                self._is_http10,
                self._arrived_s,
                self._key,
            )
        )
        self._whole += 1
        self._forget_request()
        if self._task is None:
            self.due_s = NEVER
            self._task = asyncio.get_running_loop().create_task(self._answer_all())
        elif len(self._ready) >= READY_MAX and self._transport is not None:
            self._stopped_reading = True
            self._transport.pause_reading()

    # The answer's side.

    @property
    def is_paused(self) -> bool:
        """Whether the client reads slower than is written."""
        return self._paused

    def begin(self, status: int, content_type: str, extra: Mapping[str, str]) -> None:
        """Send the head of an answer whose length is not known."""
        request = self._request
        assert request is not None
        self._begun = True
        self._chunked = not request.is_http10
        keep_alive = request.keep_alive and self._chunked
        self._write(
            http1.response_head(
                status,
                content_type,
                extra,
                date=self._server.date(),
                length=None,
                keep_alive=keep_alive,
                chunked=self._chunked,
            )
        )
        if not keep_alive:
            self._request = request._replace(keep_alive=False)

    def send(self, data: bytes) -> None:
        """Send a part of the answer begun."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """End the answer well."""
        if self._chunked:
            self._write(http1.LAST_CHUNK)

    def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        request = self._request
        self._begun = True
        head = http1.response_head(
            reply.status,
            reply.content_type,
            reply.headers,
            date=self._server.date(),
            length=len(reply.body),
            keep_alive=request is not None and request.keep_alive,
            chunked=False,
        )
        if request is not None and request.method == b"HEAD":
            self._write(head)
        else:
            self._write(head + reply.body)

    def reads_from(self, source: Source | None) -> None:
        """Tie the answer's source, so that it flows no faster than the client reads."""
        self._source = source
        if source is not None and self._paused:
            source.pause()

    async def drained(self) -> None:
        """Return when the client has read what was written; cancelled where it is gone."""
        while self._paused:
            self._resumed = asyncio.get_running_loop().create_future()
            await self._resumed

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Close as soon as nothing is being answered."""
        if self._task is None and self._transport is not None:
            self._transport.close()
        elif self._request is not None:
            self._request = self._request._replace(keep_alive=False)

    async def _answer_all(self) -> None:
        """Answer what is ready, in order, then wait for more."""
        try:
            while self._ready and self._transport is not None:
                self._request = self._ready.popleft()
                if self._stopped_reading and len(self._ready) < READY_MAX:
                    self._stopped_reading = False
                    self._transport.resume_reading()
                await self._answer(self._request)
                if not self._request.keep_alive:
                    self._close()
                    return
        finally:
            self._task = None
            self._request = None
        limits = self._server.limits
        if self._bad is not None:
            self._refuse(self._bad)
        else:
            wait_s = limits.body_timeout_s if self._arrived_s else limits.keepalive_s
            self.due_s = self._server.clock() + wait_s

    async def _answer(self, request: Request) -> None:
        """Have one request answered; the other of the two places that catch `Exception`."""
        self._begun = False
        try:
            await self._server.handler(request, self)
            if self._paused:
                await self.drained()
        except ApiError as error:
            self._answer_error(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request failed", extra={"fields": {"path": request.path[:200]}})
            self._answer_error(
                ApiError(ErrorCode.INTERNAL, "cannot answer: an internal error was logged")
            )
        finally:
            self._source = None

    def _answer_error(self, error: ApiError) -> None:
        if self._begun:
            # Half an answer is out: only a cut tells the client that it is not whole.
            self.abort()
        else:
            self.reply(self._server.encode_error(error))

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, after those before it, and close.

        What still comes is read and dropped for a moment: closing on unread bytes would reset the
        connection, and the client would never see why.
        """
        self._bad = error
        if self._task is None and self._transport is not None:
            self.reply(self._server.encode_error(error))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self.due_s = self._server.clock() + LINGER_S

    def _write(self, data: bytes) -> None:
        # Where the client is gone the request is being cancelled: there is nobody to tell.
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        """Close after what is written is out; a client that does not read it is cut."""
        if self._transport is not None:
            self.due_s = self._server.clock() + self._server.write_timeout_s
            self._transport.close()

    def _forget_request(self) -> None:
        self._method = b""
        self._target = b""
        self._headers = {}
        self._body = []
        self._body_bytes = 0
        self._fields_bytes = 0
        self._head_bytes = 0
        self._length = None
        self._is_http10 = False
        self._key = None
        self._arrived_s = 0.0

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Ignore a wish for another protocol, as RFC 9110 (7.8) allows: parse on as HTTP/1.1.

        The parser stops at the head's end; a fresh one is given a head that says only how the body
        is framed.
        """
        if self._method == b"CONNECT":
            self._refuse(http1.malformed("this is no forward proxy"))
            return
        framing = b"".join(
            name + b": " + self._headers[name] + b"\r\n"
            for name in (b"content-length", b"transfer-encoding")
            if name in self._headers
        )
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_head = True
        self._parser.feed_data(self._method + b" / HTTP/1.1\r\n" + framing + b"\r\n")
        self._ignores_head = False
        if rest:
            self.data_received(rest)

    def _inflated(self, body: bytes, encoding: bytes) -> bytes:
        """Return the body decompressed, its size bounded as if it had come plain."""
        bytes_max = self._server.limits.body_bytes_max
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
            f"cannot read the body: more than the {self._server.limits.body_bytes_max} bytes "
            "allowed",
        )
