"""One request to one node on a raw connection, and its answer on the way back.

Rule 1: every wait for a node has its deadline; a client that does not read stops the clock.
Rule 2: an exchange left before its end closes its connection: a node whose caller is gone must see
it at once.
Rule 3: a kept connection that its node closed before one byte of an answer is no failure of the
node: the request goes out again on a fresh one.
"""

import asyncio
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, Protocol, cast

import httptools

from isochrone.wire import headers
from isochrone.wire.ids import NodeId
from router.dataplane.deadlines import NEVER

HEAD_BYTES_MAX: Final = 32 * 1024
END_TIMEOUT_S: Final = 0.5


class Failure(StrEnum):
    """Why an attempt came to nothing."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    UNFIT = "unfit"
    BROKEN = "broken"
    SILENT = "silent"
    ERROR = "error"


class AttemptFailed(Exception):
    """This attempt came to nothing; `failure` says how, the message in words."""

    def __init__(self, failure: Failure, message: str, refused: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.refused = refused


class Head:
    """The head of a node's answer."""

    __slots__ = ("content_type", "fields", "load", "refused", "resumed", "status")

    def __init__(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        self.status = status
        self.fields = fields
        self.content_type = fields.get(b"content-type", b"application/json").decode("latin-1")
        load = fields.get(_LOAD)
        self.load = headers.parse_load(load.decode("latin-1")) if load else None
        self.resumed = fields.get(_RESUMED, b"").decode("latin-1")
        self.refused = fields.get(_REFUSED, b"").decode("latin-1")[:64]


_LOAD: Final = headers.LOAD.encode()
_RESUMED: Final = headers.RESUMED.encode()
_REFUSED: Final = headers.REFUSED.encode()


class Answer(Protocol):
    """What takes a node's answer in, byte by byte as it comes."""

    def on_head(self, head: Head) -> None:
        """The head is whole; AttemptFailed ends the exchange."""

    def on_body(self, data: bytes) -> None:
        """Bytes of the body, as many as came together; AttemptFailed ends the exchange."""

    def on_end(self) -> None:
        """The body is whole."""

    def on_failure(self, failure: AttemptFailed) -> None:
        """The exchange broke; nothing follows."""


class _Nobody:
    """Takes in what nobody needs any more."""

    def on_head(self, head: Head) -> None:
        """Need no head."""

    def on_body(self, data: bytes) -> None:
        """Need no bytes."""

    def on_end(self) -> None:
        """Need no end."""

    def on_failure(self, failure: AttemptFailed) -> None:
        """Lose nothing but the connection."""


class Pool(Protocol):
    """Whence connections come, and whither they go back."""

    clock: Callable[[], float]

    async def connect(self, node_id: NodeId, address: str) -> "NodeConnection":
        """Open a connection, or raise AttemptFailed."""

    def keep(self, connection: "NodeConnection") -> None:
        """Take back a connection whose exchange ended well."""

    def opened(self, connection: "NodeConnection") -> None:
        """Count a connection in."""

    def closed(self, connection: "NodeConnection") -> None:
        """Count a connection out."""


class Exchange:
    """One request to one node, and its answer on the way back."""

    __slots__ = (
        "_address",
        "_answer",
        "_body",
        "_connection",
        "_due_s",
        "_head",
        "_node_id",
        "_patience_s",
        "_paused",
        "_pool",
        "_retry",
        "is_over",
    )  # fmt: skip

    def __init__(
        self,
        pool: Pool,
        node_id: NodeId,
        address: str,
        head: bytes,
        body: bytes,
        answer: Answer,
    ) -> None:
        self._pool = pool
        self._node_id = node_id
        self._address = address
        self._head = head
        self._body = body
        self._answer = answer
        self._connection: NodeConnection | None = None
        self._retry: asyncio.Task[None] | None = None
        self._patience_s = NEVER
        self._due_s = NEVER
        self._paused = False
        self.is_over = False

    async def begin(self, connection: "NodeConnection") -> None:
        """Send the request over `connection`."""
        self._connection = connection
        connection.take(self)
        connection.due_s = self._due_s
        connection.write(self._head, self._body)

    def wait(self, patience_s: float) -> None:
        """From now on the next byte must come within `patience_s`."""
        self._patience_s = patience_s
        self._due_s = self._pool.clock() + patience_s
        if self._connection is not None and not self._paused:
            self._connection.due_s = self._due_s

    def leave(self) -> None:
        """Be done with it: at its end the connection is kept, before it is closed."""
        connection, self._connection = self._connection, None
        if self._retry is not None:
            self._retry.cancel()
        if connection is not None:
            connection.exchange = None
            connection.close()

    def let_end(self) -> None:
        """Read what is left of a body nobody needs, so that the connection can be kept."""
        if not self.is_over:
            self._answer = _Nobody()
            self.resume()
            self.wait(END_TIMEOUT_S)

    def pause(self) -> None:
        """Read no more for now: the client reads slower. The node is not to blame for the wait."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()
            self._connection.due_s = NEVER

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._connection is not None:
            self._connection.due_s = self._pool.clock() + self._patience_s
            self._connection.resume()

    # The connection's side.

    def on_head(self, head: Head) -> None:
        """Pass the head on."""
        self._answer.on_head(head)

    def on_body(self, data: bytes) -> None:
        """Pass bytes on: the wait begins anew."""
        connection = self._connection
        if connection is not None and not self._paused:
            connection.due_s = self._pool.clock() + self._patience_s
        self._answer.on_body(data)

    def on_end(self) -> None:
        """The answer is whole: the connection is free again."""
        self.is_over = True
        self._connection = None
        self._answer.on_end()

    def on_lost(self, *, is_stale: bool) -> None:
        """The connection broke before the answer was whole."""
        self._connection = None
        if is_stale:
            self._retry = asyncio.get_running_loop().create_task(self._again())
        else:
            self.fail(AttemptFailed(Failure.BROKEN, f"{self._node_id} broke off"))

    def on_silence(self) -> None:
        """The node said nothing for as long as may be."""
        self.fail(
            AttemptFailed(Failure.SILENT, f"{self._node_id} fell silent for {self._patience_s:g} s")
        )

    def fail(self, failure: AttemptFailed) -> None:
        """End the exchange badly."""
        self.is_over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange = None
            connection.close()
        self._answer.on_failure(failure)

    async def _again(self) -> None:
        try:
            await self.begin(await self._pool.connect(self._node_id, self._address))
        except AttemptFailed as failure:
            self.fail(failure)


class NodeConnection(asyncio.Protocol):
    """One connection to a node; one exchange at a time."""

    __slots__ = (
        "_body",
        "_fields",
        "_head_bytes",
        "_is_used",
        "_keeps",
        "_parser",
        "_pool",
        "_seen",
        "_transport",
        "_whole",
        "address",
        "due_s",
        "exchange",
    )  # fmt: skip

    def __init__(self, pool: Pool, address: str) -> None:
        self.address = address
        self.exchange: Exchange | None = None
        self.due_s = NEVER
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._fields: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._head_bytes = 0
        self._is_used = False
        self._seen = False
        self._whole = False
        self._keeps = False

    def take(self, exchange: Exchange) -> None:
        """Begin an exchange on it."""
        self.exchange = exchange
        self._seen = False
        self._whole = False

    def write(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        if len(body) < 16_384:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    def close(self) -> None:
        """Close it at once: what it still sends is nobody's."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no more."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None:
            self._transport.resume_reading()

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection in."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out; an exchange that was on it is broken, or begins anew on another."""
        self._transport = None
        self._pool.closed(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_lost(is_stale=self._is_used and not self._seen)

    def data_received(self, data: bytes) -> None:
        """Parse what came and pass it on, as many bytes at once as came together."""
        exchange = self.exchange
        if exchange is None:
            # An answer that nobody asked for: whatever this is, it is not ours.
            self.close()
            return
        self._seen = True
        try:
            self._parser.feed_data(data)
            if self._body:
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                exchange.on_body(body)
            if self._whole and self.exchange is exchange:
                self._end(exchange)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            exchange.fail(
                cause if isinstance(cause, AttemptFailed) else self._broken("a broken head")
            )
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(self._broken(str(error)[:120]))
        except AttemptFailed as failure:
            exchange.fail(failure)

    def on_due(self) -> None:
        """Its time is up: nobody used it, or the node is silent."""
        if self.exchange is not None:
            self.exchange.on_silence()
        else:
            self.close()

    # The parser's side.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; trailers are dropped."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise self._broken(f"a head of more than {HEAD_BYTES_MAX} bytes")
        self._fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Pass the head on; an interim one (1xx) is none."""
        status = self._parser.get_status_code()
        if status >= 200 and self.exchange is not None:
            self.exchange.on_head(Head(status, self._fields))
        self._fields = {}
        self._head_bytes = 0

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end; what came with it is passed on first."""
        self._whole = self._parser.get_status_code() >= 200
        # Asked here: after the message the parser answers for the next one.
        self._keeps = self._parser.should_keep_alive()

    def _end(self, exchange: Exchange) -> None:
        self._is_used = True
        self.exchange = None
        if self._keeps and self._transport is not None:
            self._pool.keep(self)
        else:
            self.close()
        exchange.on_end()

    def _broken(self, what: str) -> AttemptFailed:
        return AttemptFailed(Failure.BROKEN, f"{self.address} sent {what}")
