"""One connection to a node: parses received bytes and passes them to the exchange on it."""

import asyncio
from typing import Final, Protocol, cast

import httptools

from isochrone.wire.ids import NodeId
from router.dataplane.deadlines import NEVER
from router.dataplane.exchange import AttemptFailed, Dialer, NodeExchange, ResponseHead
from router.dataplane.http1 import HeaderFields, lower_name
from router.dataplane.plain_messages import plain_interim, plain_response
from router.dataplane.plain_socket import plain_socket
from router.dataplane.pumped_stream import PumpedStream
from router.dataplane.token_gatherer import TokenGatherer
from router.dataplane.token_pump import TokenPump
from router.decide.attempt import FailureCause

# Looked up once, because each answer uses it.
_PLAIN_RESPONSE: Final = plain_response
_PLAIN_INTERIM: Final = plain_interim

HEAD_BYTES_MAX: Final = 32 * 1024
ONE_WRITE_BYTES_MAX: Final = 16 * 1024
"""A body up to this size is copied behind the head: one system call, and no list of buffers."""


class NodeConnectionPool(Dialer, Protocol):
    """Opens connections and takes them back."""

    gatherer: TokenGatherer
    pump: TokenPump

    def keep(self, connection: "NodeConnection") -> None:
        """Take back a connection whose exchange ended well."""

    def on_closed(self, connection: "NodeConnection") -> None:
        """Forget a connection that is closed."""


NO_PARSER: Final = httptools.HttpResponseParser(object())
"""The parser of a connection that is not open."""


class NodeConnection:
    """One connection to a node, with one exchange at a time.

    It implements asyncio's protocol without inheriting from it: mypyc cannot compile a subclass of
    an interpreted class into a fast one.
    """

    __slots__ = (
        "_body", "_fields", "_has_received", "_is_complete", "_is_parsing", "_is_reused",
        "_keeps_alive", "_parser", "_pool", "_pumped", "_transport", "_unparsed_bytes", "due_s",
        "exchange", "node_id",
    )  # fmt: skip

    def __init__(self, pool: NodeConnectionPool, node_id: NodeId) -> None:
        self.node_id = node_id
        self.exchange: NodeExchange | None = None
        self.due_s = NEVER
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = NO_PARSER
        self._fields: HeaderFields = {}
        self._body: list[bytes] = []
        self._unparsed_bytes = 0
        self._is_reused = False
        self._has_received = False
        self._is_parsing = False
        self._is_complete = False
        self._keeps_alive = False
        self._pumped: PumpedStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""
        return self._transport is not None

    def start(self, exchange: NodeExchange) -> None:
        """Send an exchange's request."""
        self.exchange = exchange
        self.due_s = exchange.due_s
        self._unparsed_bytes = 0
        self._has_received = self._is_parsing = False
        self._is_complete = False
        if self._pumped is not None:
            self._pumped.start()
        head, body = exchange.request_head, exchange.request_body
        assert self._transport is not None
        if len(body) < ONE_WRITE_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    def close(self) -> None:
        """Close the connection at once and drop what the node still sends."""
        self.stop_pumping()
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        self.stop_pumping()
        self.let_go()

    def let_go(self) -> None:
        """Stop reading the socket, which may then be read elsewhere."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue reading."""
        if self._transport is not None:
            self._transport.resume_reading()

    def stop_pumping(self) -> None:
        """Take back a stream that is relayed in C, with what was relayed there."""
        if self._pumped is not None:
            self._pumped.leave()

    def update_due(self) -> bool:
        """Let `due_s` count what was relayed in C; return whether anything was since the last."""
        return self._pumped is not None and self._pumped.update_due()

    def plain_socket(self) -> int:
        """Return the descriptor of a socket without TLS, -1 if there is none."""
        if self._transport is None or self._transport.is_closing():
            return -1
        return plain_socket(self._transport)

    def on_returned(self, unread: bytes, unsent: bytes) -> None:
        """Go on with a stream that was relayed in C."""
        self.stop_pumping()
        exchange = self.exchange
        if exchange is None or self._transport is None:
            return
        client = exchange.chunk_sink()
        if unsent and client is not None:
            # This may pause the exchange.
            client.write_rest(unsent)
        if not exchange.is_paused:
            self._transport.resume_reading()
        if unread:
            self.data_received(unread)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, and begin to read."""
        self._transport = cast(asyncio.Transport, transport)
        # These hold the connection, and it holds them until it is lost.
        self._parser = httptools.HttpResponseParser(self)
        if self._pool.pump.is_there:
            self._pumped = PumpedStream(self._pool.pump, self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the pool; the exchange on this connection fails or is sent again."""
        self.stop_pumping()
        self._transport, self._parser, self._pumped = None, NO_PARSER, None
        self._pool.on_closed(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_connection_lost(was_unused=self._is_reused and not self._has_received)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and pass the body on in one piece."""
        exchange = self.exchange
        if exchange is None:
            # No request is open, so this is no response.
            self.close()
            return
        self._has_received = True
        if self._pumped is not None:
            self._pumped.note_bytes()
        try:
            unread = data if self._is_parsing else self._read_plain(exchange, data)
            if unread:
                self._is_parsing = True
                self._parser.feed_data(unread)
            if self._body:
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                self._unparsed_bytes = 0
                if not (self._is_complete or exchange.is_paused):
                    self.due_s = self._pool.clock() + exchange.timeout_s
                exchange.on_body(body)
                if self._pumped is not None and exchange.is_relaying and not self._is_complete:
                    self._pumped.note_token(exchange, data, body)
            elif not self._is_complete:
                # The parser buffers an incomplete header itself: this limits that buffer.
                self._unparsed_bytes += len(data)
                if self._unparsed_bytes > HEAD_BYTES_MAX:
                    raise self._broken(f"more than {HEAD_BYTES_MAX} bytes of head or trailer")
            if exchange.is_relaying and not self._is_complete:
                self._pool.gatherer.note_token()
            else:
                self._pool.gatherer.note_other()
            if self._is_complete and self.exchange is exchange:
                self._finish(exchange)
            exchange.notify()
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            exchange.fail(
                cause if isinstance(cause, AttemptFailed) else self._broken("a malformed head")
            )
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(self._broken(str(error)[:120]))
        except AttemptFailed as failure:
            exchange.fail(failure)

    def eof_received(self) -> bool:
        """Close the connection when the node half-closes it."""
        return False

    def pause_writing(self) -> None:
        """Do nothing: a request has a size limit and is written whole."""

    def resume_writing(self) -> None:
        """Do nothing."""

    def on_due(self) -> None:
        """Handle the deadline: the node is silent, or the idle connection was not used."""
        if self.update_due():
            return
        if self.exchange is not None:
            self.exchange.on_timeout()
        else:
            self.close()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header, or a trailer until its message ends."""
        self._fields[lower_name(name)] = value

    def on_headers_complete(self) -> None:
        """Pass the head to the exchange."""
        status, exchange = self._parser.get_status_code(), self.exchange
        if exchange is not None:
            if status >= 200:
                exchange.on_head(ResponseHead(status, self._fields))
            else:
                exchange.on_interim_head(self._fields)
        self._fields = {}

    def on_body(self, data: bytes) -> None:
        """Store a part of the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Note the end of the response; the body that came with it is passed on first."""
        self._is_complete = self._parser.get_status_code() >= 200
        # The parser must be read inside this callback: afterwards it describes the next message.
        self._keeps_alive = self._parser.should_keep_alive()
        # Trailers are never used. They would be in the head of the next response.
        if self._fields:
            self._fields = {}

    def _read_plain(self, exchange: NodeExchange, data: bytes) -> bytes:
        """Read what is plain at the beginning of a response; return the rest, for the parser."""
        if (interim := _PLAIN_INTERIM(data)) is not None:
            fields, data = interim
            exchange.on_interim_head(fields)
        plain = _PLAIN_RESPONSE(data)
        if plain is None:
            return data
        status, fields, body = plain
        exchange.on_head(ResponseHead(status, fields))
        self._is_complete = self._keeps_alive = True
        if body:
            self._body.append(body)
        return b""

    def _finish(self, exchange: NodeExchange) -> None:
        """Return the connection to the pool, or close it, and end the exchange."""
        self._is_reused = True
        self.exchange = None
        if exchange.is_paused:
            # The last bytes of this response paused reading; the next response must be read.
            self.resume()
        if self._keeps_alive and self._transport is not None:
            self._pool.keep(self)
        else:
            self.close()
        exchange.on_end()

    def _broken(self, what: str) -> AttemptFailed:
        return AttemptFailed(FailureCause.BROKEN, f"{self.node_id} sent {what}")
