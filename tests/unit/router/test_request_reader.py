"""The rest of a body that is only counted is read as one that the parser gets."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from router.dataplane.http_messages import HttpRequest
from router.dataplane.request_reader import (
    LARGE_PART_BYTES,
    REQUESTS_AT_ONCE_MAX,
    RequestReader,
)

BYTES_MAX = 10**6
POST = b"POST /v1/x HTTP/1.1\r\nhost: a\r\n"
SHORT = POST + b"content-length: 5\r\n\r\nhello"
MESSAGES = st.sampled_from(
    [
        SHORT,
        SHORT.replace(b"host", b"connection: close\r\nhost"),
        SHORT.replace(b"1.1\r\n", b"1.0\r\n"),
        SHORT.replace(b"1.1\r\nhost", b"1.0\r\nconnection: keep-alive\r\nhost"),
        SHORT.replace(b"host", b"connection: upgrade\r\nupgrade: h2c\r\nhost"),
        SHORT.replace(b"host", b"expect: 100-continue\r\nhost"),
        POST + b"content-length: 40\r\n\r\n" + SHORT[:40],
        POST + b"content-length: 0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\r\n",
        b"broken\r\n\r\n",
    ]
)


class Receiver:
    """Notes what a reader says, in order."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_continue_expected(self) -> None:
        self.seen.append("continue")

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        self.seen.append(count)

    def on_request(self, request: HttpRequest) -> None:
        head = (request.method, request.path, request.headers, request.is_http10)
        self.seen.append((*head, request.body, request.keep_alive))


def a_reader(receiver: Receiver, unparsed_bytes_min: int) -> RequestReader:
    return RequestReader(
        *(receiver, lambda method, path, fields: None, lambda _: None, BYTES_MAX, lambda: 1.0),
        unparsed_bytes_min=unparsed_bytes_min,
    )


def read(pieces: list[bytes], unparsed_bytes_min: int) -> Iterator[object]:
    """Feed a reader and yield what it has said after each piece, and its error."""
    receiver = Receiver()
    reader = a_reader(receiver, unparsed_bytes_min)
    for piece in pieces:
        try:
            reader.feed(piece)
        except ApiError as error:
            yield error.message
            return
        yield [*receiver.seen], reader.is_in_body, reader.arrived_s


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.lists(st.integers(1, 60), max_size=20))
def test_a_counted_body_is_read_as_a_parsed_one(messages: list[bytes], sizes: list[int]) -> None:
    data, pieces = b"".join(messages), []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    pieces = [piece for piece in [*pieces, data] if piece]
    assert list(read(pieces, 1)) == list(read(pieces, BYTES_MAX))


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("name", [b"connection", b"Proxy-Connection", b"x"])
@pytest.mark.parametrize("value", [b"keep-alive", b"close"])
def test_the_version_is_known_whatever_keeps_the_connection(
    version: bytes, name: bytes, value: bytes
) -> None:
    receiver = Receiver()
    head = b"GET / HTTP/%b\r\nhost: a\r\n%b: %b\r\n\r\n" % (version, name, value)
    a_reader(receiver, BYTES_MAX).feed(head)
    [request] = receiver.seen
    assert isinstance(request, tuple)
    is_kept = version == b"1.1" and value != b"close"
    if name == b"x":
        is_kept = version == b"1.1"
    elif value == b"keep-alive":
        is_kept = True
    assert request[3] == (version == b"1.0") and request[5] == is_kept


@pytest.mark.parametrize("version", [b"0.9", b"1.2", b"2.0"])
def test_other_versions_are_refused(version: bytes) -> None:
    for connection in (b"", b"connection: keep-alive\r\n", b"proxy-connection: keep-alive\r\n"):
        head = b"GET / HTTP/%b\r\nhost: a\r\n%b\r\n" % (version, connection)
        receiver = Receiver()
        with pytest.raises(ApiError):
            a_reader(receiver, BYTES_MAX).feed(head)
        assert not receiver.seen


@pytest.mark.parametrize("size", [1, LARGE_PART_BYTES - 1, LARGE_PART_BYTES, 50_000])
@pytest.mark.parametrize("unparsed_bytes_min", [1, BYTES_MAX])
def test_the_parts_of_a_body_are_joined_in_order(size: int, unparsed_bytes_min: int) -> None:
    body = bytes(range(250)) * 240
    data = POST + b"content-length: %d\r\n\r\n" % len(body) + body + SHORT
    receiver = Receiver()
    reader = a_reader(receiver, unparsed_bytes_min)
    # After some small parts those of the given size follow, and a small one is the last.
    cuts = [0, 60, *range(100, 140), *range(140, min(len(data), 140 + 9 * size), size)]
    for begin, end in zip(cuts, [*cuts[1:], len(data)], strict=True):
        reader.feed(data[begin:end])
    requests = [seen for seen in receiver.seen if isinstance(seen, tuple)]
    assert [request[4] for request in requests] == [body, b"hello"]
    assert sum(seen for seen in receiver.seen if isinstance(seen, int)) == len(body)


def test_of_a_flood_of_pipelined_requests_the_first_are_read() -> None:
    """256 KiB of preflights, without a key, were 6,900 requests, all answered before others."""
    receiver, preflight = Receiver(), b"OPTIONS /v1/x HTTP/1.1\r\nhost: a\r\n\r\n"
    reader = a_reader(receiver, BYTES_MAX)
    for _ in range(3):
        reader.feed(preflight * REQUESTS_AT_ONCE_MAX)
    with pytest.raises(ApiError, match="more than 64 requests arrive at once"):
        reader.feed(preflight * 1000)
    assert len(receiver.seen) == 4 * REQUESTS_AT_ONCE_MAX
