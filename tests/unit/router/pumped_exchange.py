"""One stream between real sockets: from a node, through a connection and its exchange, to a client.

It runs with the loop in C or without it, so that both can be compared.
"""

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import httptools

from isochrone.fair_shares import FairShares
from isochrone.wire.ids import NodeId
from router.dataplane import sse
from router.dataplane.exchange import AttemptFailed, NodeExchange
from router.dataplane.http_messages import ChunkSink, HttpResponse, PausableSource
from router.dataplane.node_connection import NodeConnection
from router.dataplane.plain_socket import plain_socket
from router.dataplane.token_gatherer import TokenGatherer
from router.dataplane.token_pump import TokenPump
from router.decide.attempt import FailureCause
from tests.unit.router.in_memory import one_iteration

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CLIENT_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class OnePool:
    """A pool with one connection."""

    def __init__(self) -> None:
        self.answers = FairShares(2**30)
        self.clock: Callable[[], float] = time.monotonic
        self.gatherer = TokenGatherer(0.0, self.clock)
        self.pump = TokenPump(0.0)
        self.kept: list[NodeConnection] = []

    async def connect(self, node_id: NodeId, address: str) -> NodeConnection:
        raise AssertionError

    def keep(self, connection: NodeConnection) -> None:
        self.kept.append(connection)

    def on_closed(self, connection: NodeConnection) -> None:
        """Do nothing."""


class ChunkingClient(asyncio.Protocol):
    """The router's end of a client's connection, which writes a stream in chunks."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.source: PausableSource | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        assert self.source is not None
        self.source.pause()

    def resume_writing(self) -> None:
        assert self.source is not None
        self.source.resume()

    def begin(self, status: int, content_type: str, header_lines: str) -> None:
        raise AssertionError

    def reply(self, response: HttpResponse) -> None:
        raise AssertionError

    def set_source(self, source: PausableSource | None) -> None:
        self.source = source

    async def drained(self) -> None:
        raise AssertionError

    def send(self, data: bytes) -> None:
        self.write_rest(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.write_rest(b"0\r\n\r\n")

    def chunk_sink(self) -> ChunkSink | None:
        return self

    def idle_socket(self) -> int:
        assert self.transport is not None
        return -1 if self.transport.get_write_buffer_size() else plain_socket(self.transport)

    def write_rest(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class StreamOfOneNode:
    """The sockets of one stream, and what is known of it when it has ended.

    `node` and `client` are the far ends. `received` is what the client has read, `pumped` the most
    streams that were relayed in C at a time.
    """

    def __init__(self, relay: sse.StreamRelay, *, buffer_bytes: int = 0) -> None:
        self.relay = relay
        self.pool = OnePool()
        self.received = bytearray()
        self.failure: FailureCause | None = None
        self.pumped = 0
        self.node, self._node_end = socket.socketpair()
        self.client, self._client_end = socket.socketpair()
        for end in (self.node, self._node_end, self.client, self._client_end):
            end.setblocking(False)
        if buffer_bytes:
            self._client_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.writer = ChunkingClient()
        self.exchange: NodeExchange | None = None
        self.task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect the ends, and relay once the first token has come."""
        loop = asyncio.get_running_loop()
        connection = NodeConnection(self.pool, NodeId("n1"))
        await loop.create_connection(lambda: cast(Any, connection), sock=self._node_end)
        await loop.create_connection(lambda: self.writer, sock=self._client_end)
        exchange = NodeExchange(
            *(self.pool, NodeId("n1"), "", b"POST / HTTP/1.1\r\n\r\n", b"", 10_000), self.relay
        )
        exchange.set_timeout(30.0)
        exchange.start(connection)
        self.exchange, self.connection = exchange, connection
        self.writer.source = exchange
        self.task = loop.create_task(self._relay())

    async def _relay(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        try:
            await exchange.opened
            exchange.response_head()
            await exchange.relay_to(self.writer)
            if exchange.ending:
                self.writer.send(exchange.ending)
        except AttemptFailed as failure:
            self.failure = failure.cause

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the router does."""
        until_s = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < until_s, "the router did not get there"
            await one_iteration()
            self.pumped = max(self.pumped, len(self.pool.pump))

    async def send(self, data: bytes) -> None:
        """Send bytes from the node, and wait until the router has handled them."""
        while data:
            try:
                data = data[self.node.send(data) :]
            except BlockingIOError:
                await one_iteration()
        await self.settle()

    async def settle(self) -> None:
        """Wait until the router has read all that the node has sent, unless it is paused."""
        exchange = self.exchange
        assert exchange is not None
        await self.until(
            lambda: (
                exchange.is_over
                or exchange.is_paused
                or self._node_end.fileno() < 0
                or not unread_bytes(self._node_end)
            )
        )
        # This waits for a thread that has just read them.
        exchange.last_heard_s()
        for _ in range(6):
            # Answers, callbacks of the next iteration, and what those write.
            await one_iteration()
        self.pumped = max(self.pumped, len(self.pool.pump))
        self.read()

    def read(self) -> None:
        """Let the client read what it can."""
        with suppress(BlockingIOError):
            while data := self.client.recv(1 << 16):
                self.received += data

    async def close(self) -> None:
        """End everything."""
        assert self.exchange is not None and self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.exchange.abandon()
        self.connection.close()
        assert self.writer.transport is not None
        self.writer.transport.abort()
        for _ in range(3):
            await one_iteration()
        assert not len(self.pool.pump)
        self.pool.pump.close()
        self.node.close()
        self.client.close()

    def body(self) -> bytes:
        """Return what the client got, without its chunks."""
        body = bytearray()

        class Reader:
            def on_body(self, data: bytes) -> None:
                body.extend(data)

        httptools.HttpResponseParser(Reader()).feed_data(CLIENT_HEAD + bytes(self.received))
        return bytes(body)


def unread_bytes(end: socket.socket) -> int:
    """Return how many received bytes nobody has read."""
    (count,) = struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, b"\0" * 4))
    return int(count)


async def relayed(pieces: Sequence[bytes], *, joins_reasoning: bool = False) -> StreamOfOneNode:
    """Relay a stream that comes in these pieces, to its end or to the end of the connection."""
    relay = sse.StreamRelay(wants_usage=True, joins_reasoning=joins_reasoning)
    stream = StreamOfOneNode(relay)
    await stream.open()
    for piece in pieces:
        if stream.exchange is not None and not stream.exchange.is_over:
            await stream.send(piece)
    stream.node.shutdown(socket.SHUT_WR)
    await stream.until(lambda: not stream.connection.is_open)
    await stream.settle()
    await stream.close()
    return stream
