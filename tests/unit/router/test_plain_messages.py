"""What is read at once in C is what the parser reads, and all else is left to the parser."""

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import MagicMock

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import NodeId
from router.dataplane import node_connection, plain_messages, request_reader
from router.dataplane.exchange import AttemptFailed, NodeExchange, ResponseHead
from router.dataplane.http1 import HeaderFields
from router.dataplane.http_messages import HttpRequest
from router.dataplane.node_connection import NodeConnection
from router.dataplane.plain_messages import read_none
from router.dataplane.request_reader import RequestReader
from tests.c_module import compile_now

SOURCE = Path(__file__).parents[3] / "router/dataplane/head_bytes.c"
REQUEST = (
    b"POST /v1/x?y=1 HTTP/1.1\r\nHost: a.b:80\r\nX-Y_9:  two words\r\n"
    b"Content-Length: 5\r\n\r\nhello"
)
RESPONSE = b"HTTP/1.1 200 OK\r\nDate: now\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nX-Y_9:  two words\r\n\r\n"
PIECES = st.sampled_from(
    [
        *(
            b"\r\n",
            b"\r",
            b"\n",
            b" ",
            b"\t",
            b"\0",
            b":",
            b"\xe9",
            b"5",
            b"0",
            b",",
            b";",
            b"+",
            b"-",
        ),
        *(
            b"POST ",
            b"GET ",
            b"CONNECT ",
            b" HTTP/1.1\r\n",
            b"HTTP/1.0 ",
            b"HTTP/1.1 100 Continue\r\n\r\n",
        ),
        *(
            b"204",
            b"304",
            b"101",
            b"Host: b\r\n",
            b"Content-Length: 5\r\n",
            b"content-length: 6\r\n",
        ),
        *(
            b"Connection: close\r\n",
            b"connection: keep-alive\r\n",
            b"Transfer-Encoding: chunked\r\n",
        ),
        *(b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"x: \r\n", b"x:y\r\n", b" folded\r\n"),
        *(b"Proxy-Connection: close\r\n", b"Keep-Alive: 5\r\n", b"hello"),
        *(REQUEST, RESPONSE, INTERIM),
    ]
)
CHANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 6), PIECES), max_size=4)


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


class ParsedMessage:
    """What httptools calls back for the messages in some bytes."""

    def __init__(self, kind: Any, data: bytes) -> None:
        self.target, self.body, self.headers = b"", b"", HeaderFields()
        self.repeated = self.begun = self.ended = 0
        self.is_kept = False
        self.parser = kind(self)
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.repeated += name.lower() in self.headers
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended += 1
        self.is_kept = self.parser.should_keep_alive()


def changed(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """Put pieces into a message in place of some of its bytes."""
    for at, size, piece in changes:
        data = data[:at] + piece + data[at + size :]
    return data


@given(CHANGES)
def test_a_plain_request_is_read_as_by_the_parser(
    in_c: ModuleType, changes: list[tuple[int, int, bytes]]
) -> None:
    data = changed(REQUEST, changes)
    plain = in_c.plain_request(data)
    if plain is None:
        return
    parsed = ParsedMessage(httptools.HttpRequestParser, data)
    assert plain == (parsed.target, parsed.headers, parsed.body)
    assert (parsed.begun, parsed.ended, parsed.repeated, parsed.is_kept) == (1, 1, 0, True)
    assert parsed.parser.get_method() == b"POST" and parsed.parser.get_http_version() == "1.1"
    assert not parsed.parser.should_upgrade()


@given(CHANGES)
def test_a_plain_response_is_read_as_by_the_parser(
    in_c: ModuleType, changes: list[tuple[int, int, bytes]]
) -> None:
    data = changed(RESPONSE, changes)
    plain = in_c.plain_response(data)
    if plain is None:
        return
    parsed = ParsedMessage(httptools.HttpResponseParser, data)
    assert plain == (parsed.parser.get_status_code(), parsed.headers, parsed.body)
    assert (parsed.begun, parsed.ended, parsed.repeated, parsed.is_kept) == (1, 1, 0, True)


@given(CHANGES, st.sampled_from([b"", RESPONSE]))
def test_a_plain_interim_response_is_read_as_by_the_parser(
    in_c: ModuleType, changes: list[tuple[int, int, bytes]], following: bytes
) -> None:
    data = changed(INTERIM, changes) + following
    interim = in_c.plain_interim(data)
    if interim is None:
        return
    fields, rest = interim
    assert data.endswith(rest)
    parsed = ParsedMessage(httptools.HttpResponseParser, data[: len(data) - len(rest)])
    assert (parsed.parser.get_status_code(), parsed.headers) == (103, fields)
    assert (parsed.begun, parsed.ended, parsed.repeated, parsed.body) == (1, 1, 0, b"")


def test_plain_messages_are_read(in_c: ModuleType) -> None:
    fields = {b"host": b"a.b:80", b"x-y_9": b"two words", b"content-length": b"5"}
    assert in_c.plain_request(REQUEST) == (b"/v1/x?y=1", fields, b"hello")
    fields = {b"date": b"now", b"content-length": b"5"}
    assert in_c.plain_response(RESPONSE) == (200, fields, b"hello")
    empty = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    assert in_c.plain_response(empty) == (503, {b"content-length": b"0"}, b"")
    fields = {b"x-y_9": b"two words"}
    assert in_c.plain_interim(INTERIM) == (fields, b"")
    assert in_c.plain_interim(INTERIM + RESPONSE) == (fields, RESPONSE)


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        (b"POST", b"GET"),
        (b"POST /", b"POST  /"),
        (b"POST /", b"POST http://a/"),
        (b"y=1", b'y="1"'),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"X-Y_9:", b"X-Y_9 :"),
        (b"X-Y_9:", b"X-Y_9"),
        (b"X-Y_9:", b"X!Y:"),
        (b"X-Y_9:", b"Host:"),
        (b"X-Y_9:", b":"),
        (b"X-Y_9:", b"X" * 65 + b":"),
        (b"two words", b""),
        (b"two words", b"two words "),
        (b"two words", b"two\twords"),
        (b"two words", b"two\nwords"),
        (b"two words", b"w\xc3\xb6rds"),
        (b"two words", b"w" * 8192),
        (b"X-Y_9:  two words", b"connection: keep-alive"),
        (b"X-Y_9:  two words", b"Transfer-Encoding: chunked"),
        (b"X-Y_9:  two words", b"EXPECT: 100-continue"),
        (b"Content-Length: 5", b"x: 5"),
        (b"Content-Length: 5", b"Content-Length: +5"),
        (b"Content-Length: 5", b"Content-Length: 0x5"),
        (b"Content-Length: 5", b"Content-Length: 4"),
        (b"Content-Length: 5", b"Content-Length: 6"),
        (b"Content-Length: 5", b"Content-Length: 0000000005"),
        (b"Content-Length: 5\r\n", b"Content-Length: 5\n"),
        (b"hello", b"hell"),
        (b"hello", b"hello" + REQUEST),
    ],
)
def test_other_requests_are_left_to_the_parser(
    in_c: ModuleType, part: bytes, instead: bytes
) -> None:
    assert part in REQUEST
    assert in_c.plain_request(REQUEST.replace(part, instead)) is None


@pytest.mark.parametrize(
    "status", [b"100 Continue", b"204 X", b"304 X", b"20 X", b"2000 X", b"200"]
)
def test_other_responses_are_left_to_the_parser(in_c: ModuleType, status: bytes) -> None:
    assert in_c.plain_response(RESPONSE.replace(b"200 OK", status)) is None


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        (b"103 Early Hints", b"100 Continue"),
        (b"103 Early Hints", b"101 Switching Protocols"),
        (b"103 Early Hints", b"200 OK"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"X-Y_9:", b"Content-Length:"),
        (b"X-Y_9:", b"Upgrade:"),
        (b"two words", b""),
        (b"two words", b"w" * 8192),
        (b"words\r\n", b"words\n"),
    ],
)
def test_other_interim_responses_are_left_to_the_parser(
    in_c: ModuleType, part: bytes, instead: bytes
) -> None:
    assert part in INTERIM
    assert in_c.plain_interim(INTERIM.replace(part, instead)) is None


def test_a_beginning_of_a_message_is_left_to_the_parser(in_c: ModuleType) -> None:
    for size in range(len(REQUEST)):
        assert in_c.plain_request(REQUEST[:size]) is None
    for size in range(len(RESPONSE)):
        assert in_c.plain_response(RESPONSE[:size]) is None
    for size in range(len(INTERIM)):
        assert in_c.plain_interim(INTERIM[:size]) is None
    assert in_c.plain_request(bytearray(REQUEST)) is None


class Receiver:
    """Notes the requests of a reader."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_continue_expected(self) -> None:
        self.seen.append("continue")

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        self.seen.append(count)

    def on_request(self, request: HttpRequest) -> None:
        seen = (request.method, request.path, request.query, request.headers, request.body)
        self.seen.append((*seen, request.keep_alive, request.is_http10, request.arrived_s))


def read(pieces: list[bytes]) -> list[object]:
    """Return what a reader says of some pieces, and its error."""
    receiver = Receiver()
    reader = RequestReader(receiver, lambda *_: None, lambda _: None, 10**6, lambda: 1.0)
    for piece in pieces:
        try:
            reader.feed(piece)
        except ApiError as error:
            return [*receiver.seen, error.message, reader.give_up().path]
        receiver.seen.append((reader.is_in_body, reader.arrived_s))
    return receiver.seen


@given(st.lists(st.tuples(CHANGES, st.integers(1, 400)), min_size=1, max_size=4))
@pytest.mark.skipif(not hasattr(request_reader.RequestReader.feed, "__code__"), reason="compiled")
def test_a_reader_says_the_same_with_the_parser_alone(
    in_c: ModuleType, messages: list[tuple[list[tuple[int, int, bytes]], int]]
) -> None:
    pieces = []
    for changes, size in messages:
        data = changed(REQUEST, changes)
        pieces += [piece for piece in (data[:size], data[size:]) if piece]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_reader, "_PLAIN_REQUEST", read_none)
        parsed = read(pieces)
        patch.setattr(request_reader, "_PLAIN_REQUEST", in_c.plain_request)
        assert read(pieces) == parsed


class NotedExchange:
    """Notes what a connection says of a response."""

    request_head, request_body = b"", b""
    due_s = timeout_s = 60.0
    is_relaying = is_paused = False

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.body = b""

    def on_interim_head(self, fields: HeaderFields) -> None:
        self.seen.append(("interim", dict(fields)))

    def on_head(self, head: ResponseHead) -> None:
        self.seen.append((head.status, head.fields))

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.seen.append("end")

    def fail(self, failure: AttemptFailed) -> None:
        self.seen.append(failure.cause)

    def notify(self) -> None:
        """Nothing waits."""


def answered(pieces: list[bytes]) -> tuple[list[object], bytes]:
    """Return what a connection says of the pieces of a response, and its body."""
    pool, exchange = MagicMock(), NotedExchange()
    pool.pump.is_there, pool.clock.return_value = False, 1.0
    connection = NodeConnection(pool, NodeId("n"))
    connection.connection_made(MagicMock())
    connection.start(cast(NodeExchange, exchange))
    for piece in pieces:
        connection.data_received(piece)
        if exchange.seen and not isinstance(exchange.seen[-1], tuple):
            break
    return exchange.seen, exchange.body


@given(
    st.lists(st.sampled_from([INTERIM, INTERIM.replace(b"103", b"100")]), max_size=3),
    st.sampled_from([RESPONSE, CHUNKED]),
    CHANGES,
    st.lists(st.integers(0, 200), max_size=3),
)
@pytest.mark.skipif(not hasattr(NodeConnection.data_received, "__code__"), reason="compiled")
def test_a_connection_says_the_same_with_the_parser_alone(
    in_c: ModuleType,
    notices: list[bytes],
    response: bytes,
    changes: list[tuple[int, int, bytes]],
    cuts: list[int],
) -> None:
    data = changed(b"".join(notices) + response, changes)
    ends = [*sorted(cuts), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise([0, *ends]) if data[begin:end]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_connection, "_PLAIN_INTERIM", read_none)
        patch.setattr(node_connection, "_PLAIN_RESPONSE", read_none)
        parsed = answered(pieces)
        patch.setattr(node_connection, "_PLAIN_INTERIM", in_c.plain_interim)
        patch.setattr(node_connection, "_PLAIN_RESPONSE", in_c.plain_response)
        assert answered(pieces) == parsed


@pytest.mark.parametrize("last", [b"Connection: close\r\n", b"Proxy-Connection: close\r\n"])
def test_nothing_follows_the_last_request_of_a_connection(last: bytes) -> None:
    seen = read([REQUEST.replace(b"X-Y", last + b"X-Y"), REQUEST])
    assert [isinstance(each, tuple) and len(each) for each in seen] == [8, 2, False, False]


def test_the_compiled_path_reads_plain_messages_in_c() -> None:
    is_in_c = plain_messages.plain_request is not read_none
    assert is_in_c == (importlib.util.find_spec("router.dataplane.head_bytes") is not None)
