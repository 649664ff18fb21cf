"""What a parser holds back is bounded, on both sides: a head, and a trailer after the body."""

from collections.abc import Callable

import pytest

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import NodeId
from router.dataplane.connection import NodeConnection
from router.dataplane.exchange import AttemptFailed, Exchange
from router.dataplane.message import Request
from router.dataplane.requests import HEAD_BYTES_MAX, RequestReader
from tests.unit.router.wire import End, StillLoop

CHUNKED = b"transfer-encoding: chunked\r\n"
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\n" + CHUNKED
ANSWER = b"HTTP/1.1 200 OK\r\n" + CHUNKED
BODY = b"\r\n4\r\nbody\r\n0\r\n"
PIECE = b"x" * 1024


class Owner:
    """Whoever hears of requests."""

    def __init__(self) -> None:
        self.whole: list[Request] = []

    def continue_is_expected(self) -> None:
        """Need do nothing."""

    def request_is_whole(self, request: Request) -> None:
        self.whole.append(request)


class Pool:
    """Whence a connection comes."""

    def __init__(self) -> None:
        self.kept: list[NodeConnection] = []

    def clock(self) -> float:
        return 0.0

    async def connect(self, node_id: NodeId, address: str) -> NodeConnection:
        raise AssertionError

    def keep(self, connection: NodeConnection) -> None:
        self.kept.append(connection)

    def closed(self, connection: NodeConnection) -> None:
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
    connection = NodeConnection(pool, "n:1")
    end = End(loop, connection)
    exchange = Exchange(pool, NodeId("n"), "n:1", (b"", b""), 10**6)
    exchange.begin(connection)
    connection.data_received(ANSWER + before + b"x-long: ")
    feed_without_end(connection.data_received)
    with pytest.raises(AttemptFailed, match="head or trailer"):
        exchange.answer()
    assert end.is_lost
    assert not pool.kept
    loop.close()
