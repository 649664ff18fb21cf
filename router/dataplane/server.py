"""The public HTTP server on raw transports: a connection reads requests and writes responses.

Rule 1: a request is handled only when it is complete and checked; a malformed one is answered here
and closes the connection.
Rule 2: one request of a connection is answered at a time; the following ones wait.
Rule 3: a client that disconnects cancels its request. A client that does not read pauses the source
of its response.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import Final, cast

from isochrone.service.network.connection_count import ConnectionCount, client_network
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import KeyEntry
from router.config import RouterConfig
from router.dataplane import http1
from router.dataplane.body_admission import BodyAdmission
from router.dataplane.body_receiver import read_into_buffer
from router.dataplane.deadlines import NEVER, Deadlines
from router.dataplane.http1 import HeaderFields
from router.dataplane.http_messages import ChunkSink, HttpRequest, HttpResponse, PausableSource
from router.dataplane.inline_task import InlineEvent, InlineTask
from router.dataplane.plain_socket import plain_socket
from router.dataplane.request_reader import Authorize, RequestReader

log = logging.getLogger(__name__)

UPLOAD_STEP_BYTES: Final = 1024 * 1024  # an upload has `body_timeout_s` for each of them
PIPELINED_MAX: Final = 4
"""Complete requests of one connection that may wait; from there on reading is paused."""

WRITE_BUFFER_BYTES: Final = 64 * 1024
LINGER_S: Final = 1.0  # how long bytes are read and dropped after a malformed request was answered
ABORT_TIMEOUT_S: Final = 5.0
"""How long the event loop may take to report aborted connections as lost."""

Handler = Callable[[HttpRequest, "ClientConnection"], Awaitable[None]]
EncodeError = Callable[[ApiError, HttpRequest], HttpResponse]
"""Encodes a response. A request that was not read whole has what arrived of it."""


class PublicServer:
    """The state that the connections of a listener share, and the set of them."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        authorize: Authorize,
        handler: Handler,
        encode_error: EncodeError,
        deadlines: Deadlines,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        """Answer each request by `handler`. `encode_error` writes the errors found before it."""
        self.config = config
        self._authorize = authorize
        self.handler = handler
        self.encode_error = encode_error
        self.deadlines = deadlines
        self.clock = clock
        self.is_draining = False
        self.openings = http1.ResponseOpenings(config.cors_origin, unix_clock)
        self.connections: set[ClientConnection] = set()
        self.bodies = BodyAdmission(config, clock)
        self._connection_count = ConnectionCount(
            config.connections_max, config.connections_per_address_max
        )
        self._all_closed = asyncio.Event()

    def authorize(self, method: bytes, path: str, fields: HeaderFields) -> KeyEntry | None:
        """Return the key of a request head. Raises ApiError if its body must not be read."""
        key = self._authorize(method, path, fields)
        self.bodies.check_head(key, fields)
        return key

    def make_connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, for `create_server`."""
        return cast(asyncio.Protocol, ClientConnection(self))

    async def drain(self, timeout_s: float) -> None:
        """Let open requests finish for `timeout_s`, then abort the rest."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.drain()
        await self._wait_until_closed(timeout_s)
        for connection in list(self.connections):
            connection.abort()
        await self._wait_until_closed(ABORT_TIMEOUT_S)

    def on_opened(self, connection: "ClientConnection", network: str) -> bool:
        """Count a new connection; return False if it must be refused."""
        self._connection_count.close_idlest(lambda: self.connections, self.clock())
        self.connections.add(connection)
        self.deadlines.add(connection)
        return self._connection_count.add(network) and not self.is_draining

    def on_closed(self, connection: "ClientConnection", network: str) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        self.deadlines.discard(connection)
        self._connection_count.remove(network)
        if not self.connections:
            self._all_closed.set()

    async def _wait_until_closed(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()


class ClientConnection:
    """One client's connection, and the ResponseWriter of its requests.

    It implements asyncio's protocol without inheriting from it: mypyc cannot compile a subclass of
    an interpreted class into a fast one.
    """

    __slots__ = (
        "_bytes_unread", "_has_begun", "_is_chunked", "_is_paused", "_is_reading_paused",
        "_malformed", "_network", "_pending", "_reader", "_request", "_server", "_source",
        "_task", "_transport", "_writable", "due_s", "idle_since_s",
    )  # fmt: skip

    def __init__(self, server: PublicServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(
            *(self, server.authorize, server.bodies.uploads.open),
            server.config.body_bytes_max,
            server.clock,
        )
        self._task: InlineTask | None = None
        self._pending: deque[HttpRequest] = deque()
        self._malformed: ApiError | None = None
        self._source: PausableSource | None = None
        self._network = ""
        self._is_paused = self._is_reading_paused = False
        self._request: HttpRequest | None = None
        self._has_begun = False
        self._is_chunked = False
        self._writable: InlineEvent | None = None
        self._bytes_unread = 0.0
        self.due_s = NEVER
        self.idle_since_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, nor the body of one being read."""
        return self._task is None and not self._reader.is_in_body

    @property
    def unread_bytes(self) -> int:
        """How many of the bytes written to it the client has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection or refuse it, and wait for its first request head."""
        server = self._server
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._network = client_network(transport)
        if not server.on_opened(self, self._network):
            self._transport.abort()
            return
        self.idle_since_s = server.clock()
        self.due_s = self.idle_since_s + server.config.head_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the server and cancel the request that is being answered."""
        self._server.on_closed(self, self._network)
        self._transport = None
        self._server.bodies.drop(self._reader.close(), self._network)
        for request in self._pending:
            self._server.bodies.drop(request, self._network)
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Treat a half-closed connection as closed, as proxies do."""
        return False

    def data_received(self, data: bytes) -> None:
        """Parse bytes, none after a read into the reader's buffer; answer complete requests."""
        if self._malformed is not None:
            return
        reader = self._reader
        had_begun, was_in_body = reader.arrived_s > 0, reader.is_in_body
        uploaded_steps = reader.uploaded_bytes // UPLOAD_STEP_BYTES
        try:
            reader.feed(data)
        except ApiError as error:
            self._malformed = error
            self._server.bodies.drop(reader.give_up(), self._network)
        if reader.buffer is not None and data:
            read_into_buffer(self._transport, cast(asyncio.Protocol, self), reader)
        if self._task is not None:
            return
        if self._pending:
            self.due_s = NEVER
            self._task = InlineTask(self._answer_pending())
            self._task.advance()
            return
        if self._malformed is not None:
            self._refuse(self._malformed)
            return
        # An incomplete head has a deadline from its first byte, a body from the end of its head.
        if reader.is_in_body and (
            not was_in_body or reader.uploaded_bytes // UPLOAD_STEP_BYTES > uploaded_steps
        ):
            self.due_s = self._server.clock() + self._server.config.body_timeout_s
        elif reader.arrived_s and not had_begun:
            self.due_s = reader.arrived_s + self._server.config.head_timeout_s

    def pause_writing(self) -> None:
        """Pause the response's source: the client reads more slowly."""
        self._is_paused = True
        self._bytes_unread = inf
        self._extend_write_deadline()
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        """Resume the response's source."""
        self._is_paused = False
        if self._task is not None:
            self.due_s = NEVER
        if self._source is not None:
            self._source.resume()
        if self._writable is not None:
            self._writable.set()

    def on_due(self) -> None:
        """Handle the deadline of a head, a body, an idle connection or a client not reading."""
        is_closing = self._transport is None or self._transport.is_closing()
        if self._is_paused and self._extend_write_deadline():
            return
        if self._task is not None or self._malformed is not None or is_closing:
            self.abort()
        elif self._reader.arrived_s:
            waited_s = self._server.clock() - self._reader.arrived_s
            part = "body" if self._reader.is_in_body else "head"
            text = f"cannot read the {part} of the request: incomplete after {waited_s:.1f} s"
            self._refuse(ApiError(ErrorCode.REQUEST_TIMEOUT, text))
        else:
            self._close()

    # Called by the reader.

    def on_continue_expected(self) -> None:
        """Write `100 Continue`, unless an earlier request is still to be answered."""
        if self._task is None and not self._pending:
            self._write(http1.CONTINUE)

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        """Count bytes of an unfinished body. Raises LimitExceeded."""
        self._server.bodies.hold(request, self._network, count)

    def on_request(self, request: HttpRequest) -> None:
        """Queue a complete request behind those before it."""
        self._pending.append(request)
        if len(self._pending) >= PIPELINED_MAX and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    # The ResponseWriter of the request being answered.

    def begin(self, status: int, content_type: str, header_lines: str) -> None:
        """Write the head of a stream, whose length is not known."""
        request = self._request
        assert request is not None
        self._has_begun = True
        self._is_chunked = not request.is_http10
        keep_alive = request.keep_alive and self._is_chunked
        opening = self._server.openings.of(status, content_type)
        self._write(
            http1.response_head(
                opening, header_lines, length=None, keep_alive=keep_alive, chunked=self._is_chunked
            )
        )
        if not keep_alive:
            request.keep_alive = False

    def send(self, data: bytes) -> None:
        """Write a part of the stream."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self) -> None:
        """Finish the stream."""
        if self._is_chunked:
            self._write(http1.LAST_CHUNK)

    def reply(self, response: HttpResponse) -> None:
        """Write a complete response."""
        request = self._request
        self._has_begun = True
        opening = self._server.openings.of(response.status, response.content_type)
        head = http1.response_head(
            opening,
            response.header_lines,
            length=len(response.body),
            keep_alive=request is not None and request.keep_alive,
            chunked=False,
        )
        if request is not None and request.method == b"HEAD":
            self._write(head)
        else:
            self._write(head + response.body)

    def set_source(self, source: PausableSource | None) -> None:
        """Pause `source` whenever the client reads more slowly than it sends."""
        self._source = source
        if source is not None and self._is_paused:
            source.pause()

    def chunk_sink(self) -> ChunkSink | None:
        """Return this connection, unless an old client gets its stream without chunks."""
        return self if self._is_chunked else None

    def idle_socket(self) -> int:
        """Return the descriptor of the socket if all bytes are sent over it, without TLS."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return -1
        return plain_socket(transport)

    def write_rest(self, data: bytes) -> None:
        """Write what was left of bytes that were written to the socket."""
        self._write(data)

    async def drained(self) -> None:
        """Wait until the client has read what was written; cancelled if it disconnects."""
        while self._is_paused:
            self._writable = InlineEvent()
            await self._writable

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Close the connection as soon as no request is being answered."""
        if self._task is None and self._transport is not None:
            self._transport.close()
        elif self._request is not None:
            self._request.keep_alive = False

    async def _answer_pending(self) -> None:
        """Answer the pending requests in order, then wait for the next one."""
        try:
            while self._pending and self._transport is not None:
                self._request = self._pending.popleft()
                self._server.bodies.release(self._request, self._network)
                if self._server.is_draining:
                    self._request.keep_alive = False
                if self._is_reading_paused and len(self._pending) < PIPELINED_MAX:
                    self._is_reading_paused = False
                    self._transport.resume_reading()
                await self._answer(self._request)
                if not self._request.keep_alive:
                    self._close()
                    return
        finally:
            self._task = None
            self._request = None
        if self._malformed is not None:
            self._refuse(self._malformed)
        else:
            config = self._server.config
            wait_s = config.body_timeout_s if self._reader.arrived_s else config.keepalive_s
            self.idle_since_s = self._server.clock()
            self.due_s = self.idle_since_s + wait_s

    async def _answer(self, request: HttpRequest) -> None:
        """Answer one request.

        It catches `Exception`: one request must not end the connection without an answer.
        """
        self._has_begun = False
        try:
            if self._server.bodies.charge(request):
                await self._server.bodies.inflate(request)
            await self._server.handler(request, self)
            if self._is_paused:
                await self._server.bodies.until_read(request, self)
        except ApiError as error:
            self._answer_error(request, error)
        except Exception:
            log.exception("request failed", extra={"fields": {"path": request.path[:200]}})
            text = "cannot answer: internal error; give the x-request-id to the operator"
            self._answer_error(request, ApiError(ErrorCode.INTERNAL, text))
        finally:
            self._source = None
            self._server.bodies.drop(request, self._network)

    def _answer_error(self, request: HttpRequest, error: ApiError) -> None:
        if self._has_begun:
            # Part of a response is out: only a broken connection shows that it is incomplete.
            self.abort()
        else:
            self.reply(self._server.encode_error(error, request))

    def _refuse(self, error: ApiError) -> None:
        """Answer a malformed request and close, unless earlier requests must be answered first.

        For LINGER_S the bytes that still arrive are read and dropped: a close with bytes in the
        receive buffer would reset the connection, and the client would not see the answer.
        """
        self._malformed = error
        request = self._reader.give_up()
        self._server.bodies.drop(request, self._network)
        if self._task is None and self._transport is not None:
            self.reply(self._server.encode_error(error, request))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self.due_s = self._server.clock() + LINGER_S

    def _write(self, data: bytes) -> None:
        if self._transport is not None:  # else the client is gone, and the request being cancelled
            self._transport.write(data)

    def _extend_write_deadline(self) -> bool:
        """Extend the deadline if the client has read WRITE_BUFFER_BYTES since the last call."""
        unread = self._transport.get_write_buffer_size() if self._transport is not None else inf
        if self._bytes_unread - unread < WRITE_BUFFER_BYTES:
            return False
        self._bytes_unread = unread
        self.due_s = self._server.clock() + self._server.config.write_timeout_s
        return True

    def _close(self) -> None:
        """Close after all written bytes are sent; a client that does not read them is aborted."""
        if self._transport is not None:
            self.due_s = self._server.clock() + self._server.config.write_timeout_s
            self._transport.close()
