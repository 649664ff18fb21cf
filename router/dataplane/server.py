"""The public listener on raw transports: one connection, its requests in order, its answers.

Rule 1: a request is handed on whole and checked; what is malformed is answered here and closed.
Rule 2: one request of a connection is answered at a time; those that follow wait, unread.
Rule 3: a client that is gone cancels its request; one that does not read stops what it reads from.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import formatdate
from math import inf
from typing import Final, cast

from isochrone.service.connection_count import ConnectionCount, remote_address
from isochrone.wire.errors import ApiError, ErrorCode
from router.config import RouterConfig
from router.dataplane import http1
from router.dataplane.deadlines import NEVER, Deadlines
from router.dataplane.errand import Errand, Signal
from router.dataplane.message import Reply, Request, Source
from router.dataplane.requests import LetIn, RequestReader

log = logging.getLogger(__name__)

READY_MAX: Final = 4
"""Whole requests of one connection that wait for the one before; past it nothing more is read."""

WRITE_BUFFER_BYTES: Final = 64 * 1024
KEEPALIVE_S: Final = 75.0
LINGER_S: Final = 1.0
CUT_TIMEOUT_S: Final = 5.0
"""For a loop to say of connections that were cut that they are lost."""


Handler = Callable[[Request, "ClientConnection"], Awaitable[None]]
EncodeError = Callable[[ApiError, str, str], Reply]
"""An error, and the path and the id of the request as far as they are known."""


class Server:
    """What all connections of a listener share, and how many they are."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        let_in: LetIn,
        handler: Handler,
        encode_error: EncodeError,
        deadlines: Deadlines,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        """Answer each request by `handler`; errors below it are written by `encode_error`."""
        self.config = config
        self.let_in = let_in
        self.handler = handler
        self.encode_error = encode_error
        self.deadlines = deadlines
        self.clock = clock
        self.is_draining = False
        self.connections: set[ClientConnection] = set()
        self._census = ConnectionCount(config.connections_max, config.connections_per_address_max)
        self._unix_clock = unix_clock
        self._gone = asyncio.Event()
        self._openings: dict[tuple[int, str], str] = {}
        self._openings_of = 0

    def opening(self, status: int, content_type: str) -> str:
        """Return the first lines of an answer, date included: written once a second for a kind."""
        second = int(self._unix_clock())
        if second != self._openings_of:
            self._openings_of = second
            self._openings.clear()
        kind = (status, content_type)
        found = self._openings.get(kind)
        if found is None:
            date = formatdate(second, usegmt=True)
            found = self._openings[kind] = http1.opening(status, content_type, date)
        return found

    def connection(self) -> asyncio.Protocol:
        """Make the protocol of one connection; for `create_server`."""
        return cast(asyncio.Protocol, ClientConnection(self))

    async def drain(self, timeout_s: float) -> None:
        """Let requests end, each connection closing after its own; cut what takes longer."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.drain()
        await self._all_gone(timeout_s)
        for connection in list(self.connections):
            connection.abort()
        await self._all_gone(CUT_TIMEOUT_S)

    def came(self, connection: "ClientConnection", address: str) -> bool:
        """Count a connection in; False where it is one too many."""
        self.connections.add(connection)
        self.deadlines.add(connection)
        return self._census.add(address) and not self.is_draining

    def went(self, connection: "ClientConnection", address: str) -> None:
        """Count a connection out."""
        self.connections.discard(connection)
        self.deadlines.discard(connection)
        self._census.remove(address)
        if not self.connections:
            self._gone.set()

    async def _all_gone(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._gone.clear()
                    await self._gone.wait()


class ClientConnection:
    """One client's connection. It is also the writer that a request's answer goes to.

    A protocol by its methods: whoever inherits from asyncio's cannot be compiled into a fast class.
    """

    __slots__ = (
        "_address", "_bad", "_begun", "_chunked", "_errand", "_paused", "_reader", "_ready",
        "_request", "_resumed", "_server", "_source", "_stopped_reading", "_transport",
        "_unread_bytes", "due_s",
    )  # fmt: skip

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(
            self, server.let_in, server.config.body_bytes_max, server.clock
        )
        self._errand: Errand | None = None
        self._ready: deque[Request] = deque()
        self._bad: ApiError | None = None
        self._source: Source | None = None
        self._address = ""
        self._paused = False
        self._stopped_reading = False
        self._request: Request | None = None
        self._begun = False
        self._chunked = False
        self._resumed: Signal | None = None
        self._unread_bytes = 0.0
        self.due_s = NEVER

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it, and wait for its first head."""
        server = self._server
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._address = remote_address(transport)
        if not server.came(self, self._address):
            self._transport.abort()
            return
        self.due_s = server.clock() + server.config.head_timeout_s

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; whatever still works for it is cancelled."""
        self._server.went(self, self._address)
        self._transport = None
        self._ready.clear()
        if self._errand is not None:
            self._errand.cancel()

    def eof_received(self) -> bool:
        """Take the end of what a client sends for its leaving, as proxies do."""
        return False

    def data_received(self, data: bytes) -> None:
        """Parse what came; whole requests begin, what is malformed ends the connection."""
        if self._bad is not None:
            return
        reader = self._reader
        had_begun, was_in_body = reader.arrived_s > 0, reader.is_in_body
        try:
            reader.feed(data)
        except ApiError as error:
            self._bad = error
        if self._errand is not None:
            return
        if self._ready:
            self.due_s = NEVER
            self._errand = Errand(self._answer_all())
            self._errand.go_on()
            return
        if self._bad is not None:
            self._refuse(self._bad)
            return
        # What did not come whole has its deadline: a head from its first byte, a body from its
        # head's last.
        if reader.is_in_body and not was_in_body:
            self.due_s = self._server.clock() + self._server.config.body_timeout_s
        elif reader.arrived_s and not had_begun:
            self.due_s = reader.arrived_s + self._server.config.head_timeout_s

    def pause_writing(self) -> None:
        """Stop the source of what is written: the client reads slower."""
        self._paused = True
        self._unread_bytes = inf  # From here on it counts.
        self._reads_on()
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        """Let the source flow again."""
        self._paused = False
        if self._errand is not None:
            self.due_s = NEVER
        if self._source is not None:
            self._source.resume()
        if self._resumed is not None:
            self._resumed.give()

    def on_due(self) -> None:
        """End what waited too long: a head, a body, an idle connection, a client that is deaf."""
        is_closing = self._transport is None or self._transport.is_closing()
        if self._paused and self._reads_on():
            return
        if self._errand is not None or self._bad is not None or is_closing:
            self.abort()
        elif self._reader.arrived_s:
            waited_s = self._server.clock() - self._reader.arrived_s
            what = "body" if self._reader.is_in_body else "head"
            self._refuse(
                ApiError(
                    ErrorCode.REQUEST_TIMEOUT,
                    f"cannot read the {what}: not whole after {waited_s:.1f} s",
                )
            )
        else:
            self._close()

    # The reader's side.

    def continue_is_expected(self) -> None:
        """Ask for a body whose client waits to be asked."""
        if self._errand is None and not self._ready:
            self._write(http1.CONTINUE)

    def request_is_whole(self, request: Request) -> None:
        """Let it be answered after those before it."""
        self._ready.append(request)
        if len(self._ready) >= READY_MAX and self._transport is not None:
            self._stopped_reading = True
            self._transport.pause_reading()

    # The answer's side.

    def begin(self, status: int, content_type: str, lines: str) -> None:
        """Send the head of an answer whose length is not known."""
        request = self._request
        assert request is not None
        self._begun = True
        self._chunked = not request.is_http10
        keep_alive = request.keep_alive and self._chunked
        first, chunked = self._server.opening(status, content_type), self._chunked
        self._write(
            http1.response_head(first, lines, length=None, keep_alive=keep_alive, chunked=chunked)
        )
        if not keep_alive:
            request.keep_alive = False

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
        first, length = self._server.opening(reply.status, reply.content_type), len(reply.body)
        keep_alive = request is not None and request.keep_alive
        head = http1.response_head(
            first, reply.lines, length=length, keep_alive=keep_alive, chunked=False
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
            self._resumed = Signal()
            await self._resumed

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def drain(self) -> None:
        """Close as soon as nothing is being answered."""
        if self._errand is None and self._transport is not None:
            self._transport.close()
        elif self._request is not None:
            self._request.keep_alive = False

    async def _answer_all(self) -> None:
        """Answer what is ready, in order, then wait for more."""
        try:
            while self._ready and self._transport is not None:
                self._request = self._ready.popleft()
                if self._server.is_draining:
                    self._request.keep_alive = False
                if self._stopped_reading and len(self._ready) < READY_MAX:
                    self._stopped_reading = False
                    self._transport.resume_reading()
                await self._answer(self._request)
                if not self._request.keep_alive:
                    self._close()
                    return
        finally:
            self._errand = None
            self._request = None
        if self._bad is not None:
            self._refuse(self._bad)
        else:
            body_timeout_s = self._server.config.body_timeout_s
            wait_s = body_timeout_s if self._reader.arrived_s else KEEPALIVE_S
            self.due_s = self._server.clock() + wait_s

    async def _answer(self, request: Request) -> None:
        """Have one request answered; the other of the two places that catch `Exception`."""
        self._begun = False
        try:
            await self._server.handler(request, self)
            if self._paused:
                await self.drained()
        except ApiError as error:
            self._answer_error(request, error)
        except Exception:
            log.exception("request failed", extra={"fields": {"path": request.path[:200]}})
            told = ApiError(ErrorCode.INTERNAL, "cannot answer: an internal error was logged")
            self._answer_error(request, told)
        finally:
            self._source = None

    def _answer_error(self, request: Request, error: ApiError) -> None:
        if self._begun:
            # Half an answer is out: only a cut tells the client that it is not whole.
            self.abort()
        else:
            self.reply(self._server.encode_error(error, request.path, request.known_as))

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, after those before it, and close.

        What still comes is read and dropped for a moment: closing on unread bytes would reset the
        connection, and the client would never see why.
        """
        self._bad = error
        if self._errand is None and self._transport is not None:
            self.reply(self._server.encode_error(error, self._reader.path, ""))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self.due_s = self._server.clock() + LINGER_S

    def _write(self, data: bytes) -> None:
        # Where the client is gone the request is being cancelled: there is nobody to tell.
        if self._transport is not None:
            self._transport.write(data)

    def _reads_on(self) -> bool:
        """Give a client as long again that has read a buffer's worth of what waits for it since."""
        unread = self._transport.get_write_buffer_size() if self._transport is not None else inf
        if self._unread_bytes - unread < WRITE_BUFFER_BYTES:
            return False
        self._unread_bytes = unread
        self.due_s = self._server.clock() + self._server.config.write_timeout_s
        return True

    def _close(self) -> None:
        """Close after what is written is out; a client that does not read it is cut."""
        if self._transport is not None:
            self.due_s = self._server.clock() + self._server.config.write_timeout_s
            self._transport.close()
