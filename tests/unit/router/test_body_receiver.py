"""A large body is read into its buffer as it is read in parts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError, ErrorCode
from router.dataplane import request_reader
from router.dataplane.body_receiver import DROPPED_BYTES, BodyBuffer, read_into_buffer
from router.dataplane.http_messages import HttpRequest
from router.dataplane.request_reader import RequestReader
from tests.c_module import compile_now

SOURCE = Path(__file__).parents[3] / "router/dataplane/body_buffer.c"
RESERVED_BYTES = 1152 * 1024
HEAD = b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
SHORT = HEAD % 5 + b"hello"


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


def read_into(buffer: Any, data: bytes) -> int:
    """Read as an event loop does: into what a buffer has room for. Return how much that was."""
    with memoryview(buffer) as view:
        size = min(len(view), len(data))
        view[:size] = data[:size]
        buffer.advance(size)
    return size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), min_size=1, max_size=9))
def test_a_body_is_what_was_added_and_read(in_c: ModuleType, parts: list[tuple[bool, int]]) -> None:
    body = bytes(range(250)) * (1 + sum(size for _, size in parts) // 250)
    body = body[: sum(size for _, size in parts)]
    buffer, at = in_c.open_buffer(len(body)), 0
    for is_added, size in parts:
        if is_added:
            buffer.add(body[at : at + size])
        else:
            assert read_into(buffer, body[at : at + size]) == size
        at += size
        assert buffer.count == at
    assert buffer.take() == body


@pytest.mark.parametrize("size", [1, RESERVED_BYTES - 1, RESERVED_BYTES + 1, 5_000_000])
@pytest.mark.parametrize("first", [0, 1, 70_000, 2_000_000])
def test_memory_is_reserved_for_twice_what_has_come(
    in_c: ModuleType, size: int, first: int
) -> None:
    body = (bytes(range(251)) * (size // 251 + 1))[:size]
    buffer = in_c.open_buffer(size)
    buffer.add(body[:first])
    while buffer.count < size:
        with memoryview(buffer) as view:
            room = max(RESERVED_BYTES, 2 * buffer.count, len(body[:first]))
            assert 0 < len(view) <= room - buffer.count or buffer.count == first
        assert read_into(buffer, body[buffer.count :])
    assert buffer.take() == body


def test_a_buffer_refuses_what_is_not_its_body(in_c: ModuleType) -> None:
    for length in (0, -1):
        with pytest.raises(ValueError, match="length"):
            in_c.open_buffer(length)
    buffer: Any = in_c.open_buffer(5)
    with pytest.raises(TypeError):
        type(buffer)()
    with pytest.raises(TypeError):
        buffer.add("text")
    with pytest.raises(AttributeError):
        buffer.count = 5
    for count in (-1, 6):
        with pytest.raises(ValueError, match="more than"):
            buffer.advance(count)
    with pytest.raises(ValueError, match="more than"):
        buffer.add(b"hello ")
    with pytest.raises(ValueError, match="not whole"):
        buffer.take()
    with memoryview(buffer), pytest.raises(BufferError):
        buffer.add(b"hello")
    buffer.add(b"hello")
    assert len(memoryview(buffer)) == 0
    assert buffer.take() == b"hello"
    with pytest.raises(ValueError, match="not whole"):
        buffer.take()
    with pytest.raises(BufferError):
        memoryview(buffer)
    far = in_c.open_buffer(10 * RESERVED_BYTES)
    with pytest.raises(ValueError, match="into the buffer"):
        far.advance(RESERVED_BYTES + 1)


class Receiver:
    """Notes what a reader says, in order; refuses from so many held bytes on."""

    def __init__(self, held_max: int) -> None:
        self.seen: list[object] = []
        self._left = held_max

    def on_continue_expected(self) -> None:
        self.seen.append("continue")

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ApiError(ErrorCode.RATE_LIMITED, "too much is held")
        self.seen.append(count)

    def on_request(self, request: HttpRequest) -> None:
        self.seen.append((request.path, request.headers, request.body, request.keep_alive))


class Connection(asyncio.Protocol):
    """A connection that only reads, with the transport below it."""

    def __init__(self, held_max: int) -> None:
        self.receiver = Receiver(held_max)
        self.reader = RequestReader(
            *(self.receiver, lambda *_: None, lambda _: None, 10**7, lambda: 1.0),
            unparsed_bytes_min=1,
        )
        self.protocol: Any = self
        self.is_refused = False

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        try:
            self.reader.feed(data)
        except ApiError as error:
            self.receiver.seen.append(error.message)
            self.is_refused = True
            self.reader.give_up()
        if self.reader.buffer is not None and data:
            transport: Any = self
            read_into_buffer(transport, self, self.reader)

    def deliver(self, data: bytes) -> None:
        """Deliver bytes as an event loop does, to whichever protocol is set."""
        while data:
            if self.protocol is self:
                self.data_received(data)
                return
            with memoryview(self.protocol.get_buffer(-1)) as view:
                size = min(len(view), len(data))
                view[:size] = data[:size]
            self.protocol.buffer_updated(size)
            data = data[size:]


def said(pieces: list[bytes], held_max: int) -> Iterator[object]:
    connection = Connection(held_max)
    for piece in pieces:
        connection.deliver(piece)
        if not connection.is_refused:
            yield connection.reader.is_in_body, connection.reader.arrived_s
    yield connection.receiver.seen


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.lists(st.integers(1, 200), max_size=12),
    st.sampled_from([100, 10**6]),
)
@pytest.mark.skipif(not hasattr(RequestReader.feed, "__code__"), reason="compiled")
def test_a_reader_says_the_same_without_the_buffer(
    in_c: ModuleType, bodies: list[int], sizes: list[int], held_max: int
) -> None:
    data = b"".join(HEAD % size + (bytes(range(200)) * 2)[:size] for size in bodies) + SHORT
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    pieces = [piece for piece in [*pieces, data] if piece]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_reader, "_OPEN_BUFFER", None)
        in_parts = list(said(pieces, held_max))
        patch.setattr(request_reader, "_OPEN_BUFFER", in_c.open_buffer)
        assert list(said(pieces, held_max)) == in_parts


class Reader:
    """A reader whose request is refused."""

    buffer: BodyBuffer | None = None


def test_what_follows_a_refused_request_is_dropped() -> None:
    connection = Connection(0)
    transport: Any = connection
    read_into_buffer(transport, connection, Reader())
    assert len(connection.protocol.get_buffer(-1)) == DROPPED_BYTES
    connection.protocol.buffer_updated(9)
    assert connection.protocol is connection and not connection.receiver.seen
