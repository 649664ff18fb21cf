"""Who sends or reads without end is bounded: what a parser holds back, how slowly one may read."""

from collections.abc import Callable

import pytest

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import NodeId
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.exchange import AttemptFailed, NodeExchange
from router.dataplane.http_messages import HttpRequest, HttpResponse
from router.dataplane.node_connection import NodeConnection
from router.dataplane.request_reader import HEAD_BYTES_MAX, RequestReader
from router.dataplane.server import WRITE_BUFFER_BYTES, ClientConnection, PublicServer
from tests.unit.router.wire import End, StillLoop

CHUNKED = b"transfer-encoding: chunked\r\n"
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\n" + CHUNKED
ANSWER = b"HTTP/1.1 200 OK\r\n" + CHUNKED
BODY = b"\r\n4\r\nbody\r\n0\r\n"
PIECE = b"x" * 1024


class Owner:
    """Whoever hears of requests."""

    def __init__(self) -> None:
        self.whole: list[HttpRequest] = []

    def on_continue_expected(self) -> None:
        """Need do nothing."""

    def on_request(self, request: HttpRequest) -> None:
        self.whole.append(request)


class Pool:
    """Whence a connection comes."""

    def __init__(self) -> None:
        self.kept: list[NodeConnection] = []
        self.clock: Callable[[], float] = lambda: 0.0

    async def connect(self, node_id: NodeId, address: str) -> NodeConnection:
        raise AssertionError

    def keep(self, connection: NodeConnection) -> None:
        self.kept.append(connection)

    def on_closed(self, connection: NodeConnection) -> None:
        """Need do nothing."""


def a_reader(owner: Owner) -> RequestReader:
    return RequestReader(owner, lambda method, path, fields: None, 10**6, lambda: 0.0)


def feed_without_end(feed: Callable[[bytes], None]) -> None:
    """Feed a header that never ends, as far as it must have been refused."""
    for _ in range(HEAD_BYTES_MAX // len(PIECE) + 1):
        feed(PIECE)


@pytest.mark.parametrize("before", [b"", BODY], ids=["head", "trailer"])
def test_a_client_cannot_have_more_held_than_a_head(before: bytes) -> None:
    owner = Owner()
    reader = a_reader(owner)
    reader.feed(REQUEST + before + b"x-long: ")
    with pytest.raises(ApiError, match="head or trailer"):
        feed_without_end(reader.feed)
    assert not owner.whole


def test_a_body_in_many_small_chunks_is_no_head() -> None:
    owner = Owner()
    reader = a_reader(owner)
    for byte in REQUEST + b"\r\n" + b"1\r\nb\r\n" * 7_000 + b"0\r\n\r\n":
        reader.feed(bytes([byte]))
    assert [len(request.body) for request in owner.whole] == [7_000]


@pytest.mark.parametrize("before", [b"", BODY], ids=["head", "trailer"])
def test_a_node_cannot_either(before: bytes) -> None:
    loop, pool = StillLoop(), Pool()
    connection = NodeConnection(pool, NodeId("n"))
    end = End(loop, connection)
    exchange = NodeExchange(pool, NodeId("n"), "n:1", b"", b"", 10**6)
    exchange.start(connection)
    connection.data_received(ANSWER + before + b"x-long: ")
    feed_without_end(connection.data_received)
    with pytest.raises(AttemptFailed, match="head or trailer"):
        exchange.response_head()
    assert end.is_lost
    assert not pool.kept
    loop.close()


@pytest.mark.parametrize("read_bytes", [0, WRITE_BUFFER_BYTES - 1, WRITE_BUFFER_BYTES])
def test_who_reads_on_slowly_is_not_cut_and_who_hardly_does_is(read_bytes: int) -> None:
    loop = StillLoop()

    async def handler(request: HttpRequest, client: ClientConnection) -> None:
        client.reply(HttpResponse(200, b"x" * 10 * WRITE_BUFFER_BYTES))

    server = PublicServer(
        config=RouterConfig(),
        authorize=lambda method, path, fields: None,
        handler=handler,
        encode_error=lambda error, path, request_id: HttpResponse(500, b""),
        deadlines=Deadlines(loop.time),
        clock=loop.time,
        unix_clock=loop.time,
    )
    client = server.make_connection()
    assert isinstance(client, ClientConnection)
    end = End(loop, client)
    loop.settle(lambda: client.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
    for _ in range(5):
        assert client.due_s == loop.now_s + 20.0
        loop.now_s += 20.0
        end.outbox = end.outbox[read_bytes:]
        loop.settle(client.on_due)
        if read_bytes < WRITE_BUFFER_BYTES:
            break
    assert end.is_lost is (read_bytes < WRITE_BUFFER_BYTES)
    loop.settle(end.abort)
    loop.close()
