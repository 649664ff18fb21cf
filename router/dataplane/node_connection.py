"""One connection to a node: bytes in; an answer's head and body out to the exchange on it."""

import asyncio
from typing import Final, Protocol, cast

import httptools

from isochrone.wire.ids import NodeId
from router.dataplane.deadlines import NEVER
from router.dataplane.exchange import (
    AttemptFailed,
    Dialer,
    FailureCause,
    NodeExchange,
    ResponseHead,
)
from router.dataplane.http1 import Fields, lower

HEAD_BYTES_MAX: Final = 32 * 1024


class NodeConnectionPool(Dialer, Protocol):
    """Whence connections come, and whither they go back."""

    def keep(self, connection: "NodeConnection") -> None:
        """Take back a connection whose exchange ended well."""

    def closed(self, connection: "NodeConnection") -> None:
        """Count a connection out."""


class NodeConnection:
    """One connection to a node; one exchange at a time.

    A protocol by its methods: whoever inherits from asyncio's cannot be compiled into a fast class.
    """

    __slots__ = (
        "_body", "_fields", "_held_bytes", "_is_used", "_keeps", "_parser", "_pool", "_seen",
        "_transport", "_whole", "due_s", "exchange", "node_id",
    )  # fmt: skip

    def __init__(self, pool: NodeConnectionPool, node_id: NodeId) -> None:
        self.node_id = node_id
        self.exchange: NodeExchange | None = None
        self.due_s = NEVER
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._fields: Fields = {}
        self._body: list[bytes] = []
        self._held_bytes = 0
        self._is_used = False
        self._seen = False
        self._whole = False
        self._keeps = False

    @property
    def is_open(self) -> bool:
        """Whether it is there to be used."""
        return self._transport is not None

    def begin(self, exchange: NodeExchange) -> None:
        """Send an exchange's request."""
        self.exchange = exchange
        self.due_s = exchange.due_s
        self._held_bytes = 0
        self._seen = False
        self._whole = False
        head, body = exchange.request
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
        """Be open."""
        self._transport = cast(asyncio.Transport, transport)

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
                self._held_bytes = 0
                if not (self._whole or exchange.is_paused):
                    # The wait begins anew.
                    self.due_s = self._pool.clock() + exchange.patience_s
                exchange.on_body(body)
            elif not self._whole:
                # A header is held back until it is whole: what is held is bounded here.
                self._held_bytes += len(data)
                if self._held_bytes > HEAD_BYTES_MAX:
                    raise self._broken(f"more than {HEAD_BYTES_MAX} bytes of head or trailer")
            if self._whole and self.exchange is exchange:
                self._end(exchange)
            exchange.tell()
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            exchange.fail(
                cause if isinstance(cause, AttemptFailed) else self._broken("a broken head")
            )
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(self._broken(str(error)[:120]))
        except AttemptFailed as failure:
            exchange.fail(failure)

    def eof_received(self) -> bool:
        """Take the end of what a node sends for its leaving."""
        return False

    def pause_writing(self) -> None:
        """Need do nothing: a request is bounded, and written whole."""

    def resume_writing(self) -> None:
        """Need do nothing either."""

    def on_due(self) -> None:
        """Its time is up: nobody used it, or the node is silent."""
        if self.exchange is not None:
            self.exchange.on_silence()
        else:
            self.close()

    # The parser's side.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; trailers are dropped."""
        self._fields[lower(name)] = value

    def on_headers_complete(self) -> None:
        """Pass the head on; an interim one (1xx) is none."""
        status = self._parser.get_status_code()
        if status >= 200 and self.exchange is not None:
            self.exchange.on_head(ResponseHead(status, self._fields))
        self._fields = {}

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end; what came with it is passed on first."""
        self._whole = self._parser.get_status_code() >= 200
        # Asked here: after the message the parser answers for the next one.
        self._keeps = self._parser.should_keep_alive()

    def _end(self, exchange: NodeExchange) -> None:
        self._is_used = True
        self.exchange = None
        if exchange.is_paused:
            # Its last bytes stopped it: the next one's answer is to be read.
            self.resume()
        if self._keeps and self._transport is not None:
            self._pool.keep(self)
        else:
            self.close()
        exchange.on_end()

    def _broken(self, what: str) -> AttemptFailed:
        return AttemptFailed(FailureCause.BROKEN, f"{self.node_id} sent {what}")
