"""Limits of one connection: how much a parser may buffer, and how slowly a client may read."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest

from isochrone.fair_shares import FairShares
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import NodeId
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.exchange import AttemptFailed, NodeExchange
from router.dataplane.http_messages import HttpRequest, HttpResponse
from router.dataplane.inline_task import InlineEvent
from router.dataplane.node_connection import NodeConnection
from router.dataplane.request_reader import HEAD_BYTES_MAX, RequestReader
from router.dataplane.server import (
    WRITE_BUFFER_BYTES,
    ClientConnection,
    Handler,
    PublicServer,
)
from router.dataplane.token_gatherer import TokenGatherer
from router.dataplane.token_pump import TokenPump
from tests.unit.router.in_memory import FakeTransport, ManualLoop

CHUNKED = b"transfer-encoding: chunked\r\n"
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\n" + CHUNKED
RESPONSE = b"HTTP/1.1 200 OK\r\n" + CHUNKED
BODY = b"\r\n4\r\nbody\r\n0\r\n"
PIECE = b"x" * 1024


class CollectingReceiver:
    """Collects the requests of a reader."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []

    def on_continue_expected(self) -> None:
        """Do nothing."""

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        """Do nothing."""

    def on_request(self, request: HttpRequest) -> None:
        self.requests.append(request)


class FakePool:
    """A connection pool that opens no connections."""

    def __init__(self) -> None:
        self.kept: list[NodeConnection] = []
        self.answers = FairShares(2**30)
        self.clock: Callable[[], float] = lambda: 0.0
        self.gatherer = TokenGatherer(0.0, self.clock)
        self.pump = TokenPump(0.0)

    async def connect(self, node_id: NodeId, address: str) -> NodeConnection:
        raise AssertionError

    def keep(self, connection: NodeConnection) -> None:
        self.kept.append(connection)

    def on_closed(self, connection: NodeConnection) -> None:
        """Do nothing."""


def a_reader(receiver: CollectingReceiver) -> RequestReader:
    return RequestReader(
        receiver, lambda method, path, fields: None, lambda _: None, 10**6, lambda: 0.0
    )


def feed_endless_header(feed: Callable[[bytes], None]) -> None:
    """Feed a header that never ends, until it is larger than allowed."""
    for _ in range(HEAD_BYTES_MAX // len(PIECE) + 1):
        feed(PIECE)


@pytest.mark.parametrize("before", [b"", BODY], ids=["head", "trailer"])
def test_an_endless_header_of_a_client_is_refused(before: bytes) -> None:
    receiver = CollectingReceiver()
    reader = a_reader(receiver)
    reader.feed(REQUEST + before + b"x-long: ")
    with pytest.raises(ApiError, match="head or trailer"):
        feed_endless_header(reader.feed)
    assert not receiver.requests


@pytest.mark.parametrize("size", [1, 10**6], ids=["bytes", "whole"])
@pytest.mark.parametrize(("fields", "is_read"), [(128, True), (129, False)])
def test_a_head_has_a_limited_number_of_fields(size: int, fields: int, is_read: bool) -> None:
    """Those of 500 unfinished heads of 30 kB took 168 MiB."""
    receiver = CollectingReceiver()
    reader = a_reader(receiver)
    lines = [b"x%d: y\r\n" % number for number in range(fields - 2)]
    sent = REQUEST.replace(CHUNKED, b"") + b"".join(lines) + b"content-length: 1\r\n\r\nb"
    with nullcontext() if is_read else pytest.raises(ApiError, match="more than 128 fields"):
        for at in range(0, len(sent), size):
            reader.feed(sent[at : at + size])
    assert len(receiver.requests) == is_read


def test_the_limit_of_a_head_does_not_count_a_body_of_many_small_chunks() -> None:
    receiver = CollectingReceiver()
    reader = a_reader(receiver)
    for byte in REQUEST + b"\r\n" + b"1\r\nb\r\n" * 7_000 + b"0\r\n\r\n":
        reader.feed(bytes([byte]))
    assert [len(request.body) for request in receiver.requests] == [7_000]


@pytest.mark.parametrize("before", [b"", BODY], ids=["head", "trailer"])
def test_an_endless_header_of_a_node_fails_the_exchange(before: bytes) -> None:
    loop, pool = ManualLoop(), FakePool()
    connection = NodeConnection(pool, NodeId("n"))
    transport = FakeTransport(loop, connection)
    exchange = NodeExchange(pool, NodeId("n"), "n:1", b"", b"", 10**6)
    exchange.start(connection)
    connection.data_received(RESPONSE + before + b"x-long: ")
    feed_endless_header(connection.data_received)
    with pytest.raises(AttemptFailed, match="head or trailer"):
        exchange.response_head()
    assert transport.is_lost
    assert not pool.kept
    loop.close()


def test_trailers_of_a_response_are_not_in_the_head_of_the_next_one() -> None:
    loop, pool = ManualLoop(), FakePool()
    connection = NodeConnection(pool, NodeId("n"))
    FakeTransport(loop, connection)
    body = b"2\r\nok\r\n0\r\nx-isochrone-load: 9\r\n\r\n"
    for _ in range(2):
        exchange = NodeExchange(pool, NodeId("n"), "n:1", b"", b"", 10**6)
        exchange.start(connection)
        connection.data_received(RESPONSE + b"\r\n" + body)
        assert set(exchange.response_head().fields) == {b"transfer-encoding"}
    loop.close()


def a_server(loop: ManualLoop, handler: Handler, config: RouterConfig) -> PublicServer:
    return PublicServer(
        config=config,
        authorize=lambda method, path, fields: None,
        handler=handler,
        encode_error=lambda error, request: HttpResponse(500, b""),
        deadlines=Deadlines(loop.time),
        clock=loop.time,
        unix_clock=loop.time,
    )


def test_idle_connections_of_strangers_keep_nobody_out() -> None:
    """20,000 of them, from four addresses, kept all others from a router."""
    loop = ManualLoop()

    async def handler(request: HttpRequest, client: ClientConnection) -> None:
        if request.path == "/slow":
            await InlineEvent()
        client.reply(HttpResponse(200, b"ok"))

    config = RouterConfig(connections_max=16, connections_per_address_max=100)
    server = a_server(loop, handler, config)
    transports = []
    for path in (b"/slow", b"/", *(b"" for _ in range(12)), b"/"):
        client = server.make_connection()
        transports.append(FakeTransport(loop, client))
        if path:
            request = b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n"
            loop.settle(partial(client.data_received, request))
        loop.now_s += 1.0
    assert not any(transport.is_lost for transport in transports)
    for lost in ([1], [1, 2], [1, 2, 3]):
        transports.append(FakeTransport(loop, server.make_connection()))
        loop.settle(lambda: None)
        loop.now_s += 1.0
        assert [n for n, transport in enumerate(transports) if transport.is_lost] == lost
    for transport in transports:
        loop.settle(transport.abort)
    loop.close()


@pytest.mark.parametrize("read_bytes", [0, WRITE_BUFFER_BYTES - 1, WRITE_BUFFER_BYTES])
def test_a_client_is_disconnected_unless_it_reads_a_buffer_in_each_write_timeout(
    read_bytes: int,
) -> None:
    loop = ManualLoop()

    async def handler(request: HttpRequest, client: ClientConnection) -> None:
        client.reply(HttpResponse(200, b"x" * 10 * WRITE_BUFFER_BYTES))

    server = a_server(loop, handler, RouterConfig())
    client = server.make_connection()
    assert isinstance(client, ClientConnection)
    transport = FakeTransport(loop, client)
    loop.settle(lambda: client.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
    for _ in range(5):
        assert client.due_s == loop.now_s + 20.0
        loop.now_s += 20.0
        transport.outbox = transport.outbox[read_bytes:]
        loop.settle(client.on_due)
        if read_bytes < WRITE_BUFFER_BYTES:
            break
    assert transport.is_lost is (read_bytes < WRITE_BUFFER_BYTES)
    loop.settle(transport.abort)
    loop.close()
