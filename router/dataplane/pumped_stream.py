"""One connection's stream while C relays its tokens: when it goes there, and how it comes back.

A stream goes after a token that left nothing open: the node's bytes ended with a whole chunk, the
client's socket took all that was written, and neither socket is encrypted.
"""

import asyncio
from typing import Final, Protocol

from router.dataplane.exchange import NodeExchange
from router.dataplane.token_pump import PumpedConnection, TokenPump

TOKENS_MIN: Final = 8
"""A stream that came back after fewer tokens waits for twice as many as the last time, so that one
whose frames differ costs little."""

TOKENS_WAITED_MAX: Final = 64


class PumpedConnectionToNode(PumpedConnection, Protocol):
    """The connection of the stream."""

    exchange: NodeExchange | None
    due_s: float

    def plain_socket(self) -> int:
        """Return the descriptor of a socket without TLS, -1 if there is none."""

    def let_go(self) -> None:
        """Stop reading."""


class PumpedStream:
    """The streams of one connection, one after the other."""

    __slots__ = (
        "_candidate", "_connection", "_exchange", "_heard_s", "_pump", "_relayed", "_slot",
        "_wanted",
    )  # fmt: skip

    def __init__(self, pump: TokenPump, connection: PumpedConnectionToNode) -> None:
        self._pump = pump
        self._connection = connection
        self._exchange: NodeExchange | None = None
        """The exchange whose tokens are relayed in C."""
        self._slot = -1
        self._candidate = b""
        self._relayed = 0
        self._wanted = 1
        self._heard_s = 0.0

    def start(self) -> None:
        """Begin with a new exchange."""
        self._candidate = b""
        self._relayed = 0
        self._wanted = 1

    def note_bytes(self) -> None:
        """Note that bytes came, which may end within a chunk."""
        self._candidate = b""

    def note_token(self, exchange: NodeExchange, received: bytes, body: bytes) -> None:
        """Note that `body`, all that was in the received bytes, went to the client."""
        self._relayed += 1
        if self._relayed >= self._wanted and is_one_chunk(received, body):
            self._candidate = body
            # Bytes that were already written are sent before that.
            asyncio.get_running_loop().call_soon(self._attach, exchange, body)

    def leave(self) -> None:
        """Take the stream back, if it is relayed in C, with all that was relayed there."""
        if self._slot < 0:
            return
        exchange = self._exchange
        assert exchange is not None and exchange.relay is not None
        tokens = self._pump.take(self._slot)
        self._slot, self._exchange = -1, None
        exchange.relay.take_pumped(tokens.count, tokens.text)
        self._connection.due_s = max(tokens.heard_s, self._heard_s) + exchange.timeout_s
        self._relayed = 0
        wanted = 1 if tokens.count >= TOKENS_MIN else 2 * self._wanted
        self._wanted = min(wanted, TOKENS_WAITED_MAX)

    def update_due(self) -> bool:
        """Move the deadline to after the last token; return whether one came since the last call.

        If the process was held up, tokens may wait in the socket: the next call tells.
        """
        exchange = self._exchange
        if self._slot < 0 or exchange is None:
            return False
        heard_s = self._pump.heard_s(self._slot)
        self._connection.due_s = heard_s + exchange.timeout_s
        has_come = heard_s > self._heard_s
        self._heard_s = heard_s
        return has_come

    def _attach(self, exchange: NodeExchange, body: bytes) -> None:
        connection, relay = self._connection, exchange.relay
        is_current = self._candidate is body and connection.exchange is exchange
        if not is_current or self._slot >= 0 or exchange.is_paused or relay is None:
            return
        self._candidate = b""
        client = exchange.chunk_sink()
        client_fd = client.idle_socket() if client is not None else -1
        node_fd = connection.plain_socket() if client_fd >= 0 else -1
        frame = relay.pumped_frame(body) if node_fd >= 0 else None
        if frame is None:
            self._relayed = 0
            self._wanted = min(2 * self._wanted, TOKENS_WAITED_MAX)
            return
        connection.let_go()
        self._slot = self._pump.attach(
            connection, node_fd, client_fd, frame, keeps_text=relay.is_plain
        )
        if self._slot < 0:
            connection.on_returned(b"", b"")
            return
        self._exchange = exchange
        self._heard_s = self._pump.heard_s(self._slot)


def is_one_chunk(received: bytes, body: bytes) -> bool:
    """Return whether `received`, of which a parser took `body`, is one chunk from end to end.

    The parser has then taken the lines around the body as those of a chunk. If it had been within
    another chunk, they would have been a part of the body.
    """
    end = received.find(b"\r\n")
    if not 0 < end <= 6 or len(received) != end + 4 + len(body):
        return False
    try:
        return int(received[:end], 16) == len(body)
    except ValueError:
        return False
