"""A stream whose tokens are relayed in C is the same stream: for the client, and for the router."""

import asyncio
import importlib.util
import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dataplane import token_pump
from router.dataplane.sse import StreamRelay, data_frame
from router.dataplane.token_pump import pumped_frame
from router.decide.attempt import FailureCause
from tests.c_module import compile_now
from tests.unit.router.in_memory import one_iteration
from tests.unit.router.pumped_exchange import HEAD, StreamOfOneNode, relayed

SOURCE = Path(__file__).parents[3] / "router" / "dataplane" / "stream_pump.c"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


@pytest.fixture
def pump_in_c(in_c: ModuleType) -> Iterator[None]:
    """Relay in C, in either build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_pump, "new_pump", in_c.StreamPump)
        yield


def a_frame(text: str, name: str = "content", **fields: Any) -> bytes:
    """Return a frame with one token."""
    choice = {"index": 0, "delta": {name: text}, "finish_reason": None}
    return data_frame({"id": "c-1", "created": 1, "choices": [choice], **fields})


def raw_frame(text: bytes) -> bytes:
    """Return a frame of the same shape with a text that is not escaped."""
    return a_frame("~").replace(b"~", text)


def a_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ORDINARY = st.sampled_from(["t1 ", "h\xe9", "\N{GRINNING FACE}", 'a "b" \\ c', "\n\n", "", "error"])
TOKENS = ORDINARY.map(a_frame)
OTHERS = st.sampled_from(
    [
        *(raw_frame(text) for text in (b"\\ud83d\\ude00", b"\\ud83d", b"\\ude00", b"\\u00e9\\n")),
        *(raw_frame(text) for text in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"a\tb", b"\\x")),
        *(raw_frame(text) for text in (b"\\u12", b"\\", b"\xe2\x82", b"\xf4\x90\x80\x80")),
        a_frame("x", created=2),
        a_frame("thinks ", "reasoning_content"),
        a_frame("thinks ", "reasoning"),
        a_frame("x", usage=None),
        a_frame("x", usage=USAGE),
        a_frame("x").replace(b"data: ", b"data:"),
        a_frame("x").replace(b"\n", b"\r\n"),
        a_frame("x").replace(b"\n\n", b"\nid: 1\n\n"),
        data_frame({"choices": [{"index": 1, "delta": {"content": "y"}}]}),
        data_frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        data_frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        data_frame({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}),
        b": ping\n\n",
    ]
)
ENDS = st.sampled_from(
    [
        b"",
        b"data: [DONE]\n\n",
        data_frame({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n",
        data_frame({"error": {"message": "engine died", "code": "internal_error"}}),
        data_frame({"error": {"message": "no", "code": 400}}),
    ]
)
FRAMES = st.lists(TOKENS | TOKENS | TOKENS | TOKENS | OTHERS, min_size=2, max_size=12)
FRAMINGS = st.sampled_from(["one", "one", "one", "two", "split", "upper", "zeros", "extension"])


def in_chunks(frames: Sequence[bytes], framing: str) -> list[bytes]:
    """Return frames as a node writes them."""
    if framing == "two":
        return [a_chunk(b"".join(frames[n : n + 2])) for n in range(0, len(frames), 2)]
    if framing == "split":
        return [a_chunk(part) for frame in frames for part in (frame[:9], frame[9:])]
    chunks = [a_chunk(frame) for frame in frames]
    if framing == "upper":
        return [chunk[:2].upper() + chunk[2:] for chunk in chunks]
    if framing == "zeros":
        return [b"00" + chunk for chunk in chunks]
    if framing == "extension":
        return [chunk.replace(b"\r\n", b";a=b\r\n", 1) for chunk in chunks]
    return chunks


def cut(chunks: Sequence[bytes], cuts: Sequence[int]) -> list[bytes]:
    """Return what the network makes of chunks: mostly each by itself, but cut or joined there."""
    pieces = [chunks[0]]
    for n, chunk in enumerate(chunks[1:]):
        where = cuts[n % len(cuts)] if cuts else -1
        if where < 0:
            pieces.append(chunk)
        elif where == 0:
            pieces[-1] += chunk
        else:
            pieces[-1] += chunk[:where]
            pieces.append(chunk[where:])
    return [piece for piece in pieces if piece]


CUTS = st.lists(st.sampled_from([-1, -1, -1, -1, 0]) | st.integers(1, 160), max_size=8)


def in_both_ways(
    pieces: Sequence[bytes], in_c: ModuleType, *, joins_reasoning: bool = False
) -> list[StreamOfOneNode]:
    """Relay a stream with C and without."""
    streams = []
    for new_pump in (in_c.StreamPump, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_pump, "new_pump", new_pump)
            streams.append(asyncio.run(relayed(pieces, joins_reasoning=joins_reasoning)))
    return streams


def same(pieces: Sequence[bytes], in_c: ModuleType, *, joins_reasoning: bool) -> StreamOfOneNode:
    """Relay a stream with and without C, and compare all that is known of it."""
    in_both, in_python = in_both_ways(pieces, in_c, joins_reasoning=joins_reasoning)
    assert in_both.body() == in_python.body()
    assert in_both.failure == in_python.failure
    for name in ("usage", "is_done", "has_failed", "error_message", "declined_body"):
        assert getattr(in_both.relay, name) == getattr(in_python.relay, name), name
    generated, expected = in_both.relay.generated(), in_python.relay.generated()
    if not expected.is_plain:
        # The text is then of no use, and is not kept.
        generated, expected = generated._replace(text=""), expected._replace(text="")
    assert generated == expected
    assert len(in_both.pool.kept) == len(in_python.pool.kept)
    assert not in_python.pumped
    return in_both


@settings(max_examples=150)
@given(FRAMES, ENDS, FRAMINGS, CUTS, st.booleans(), st.booleans())
def test_a_stream_is_the_same_wherever_it_is_cut(
    in_c: ModuleType,
    frames: list[bytes],
    end: bytes,
    framing: str,
    cuts: list[int],
    ends_body: bool,
    joins_reasoning: bool,
) -> None:
    chunks = in_chunks([*frames, end] if end else frames, framing)
    pieces = cut([HEAD + chunks[0], *chunks[1:]], cuts)
    if ends_body:
        pieces[-1] += b"0\r\n\r\n"
    same(pieces, in_c, joins_reasoning=joins_reasoning)


@settings(max_examples=150)
@given(
    st.lists(TOKENS, min_size=3, max_size=8),
    FRAMINGS,
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=3),
    CUTS,
)
def test_bytes_that_are_wrong_end_it_alike(
    in_c: ModuleType,
    frames: list[bytes],
    framing: str,
    changes: list[tuple[int, int]],
    cuts: list[int],
) -> None:
    chunks = [bytearray(chunk) for chunk in in_chunks([*frames, b"data: [DONE]\n\n"], framing)]
    for position, byte in changes:
        chunk = chunks[-1 - position % (len(chunks) - 1)]
        chunk[position % len(chunk)] = byte
    pieces = cut([HEAD + chunks[0], *(bytes(chunk) for chunk in chunks[1:])], cuts)
    in_both, in_python = in_both_ways(pieces, in_c)
    assert in_both.failure == in_python.failure
    assert in_both.relay.is_done == in_python.relay.is_done
    if in_both.failure is None:
        assert in_both.body() == in_python.body()
    else:
        # What is right before the first wrong byte of a read is relayed by C only.
        assert in_both.body().startswith(in_python.body())


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
@pytest.mark.parametrize("joins_reasoning", [False, True])
def test_tokens_are_relayed_in_c(in_c: ModuleType, name: str, *, joins_reasoning: bool) -> None:
    texts = ["a", " b", "", "\xe9", '"', "\N{GRINNING FACE}"] * 4
    pieces = [HEAD, *(a_chunk(a_frame(text, name)) for text in texts)]
    pieces += [a_chunk(a_frame("end")), a_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    stream = same(pieces, in_c, joins_reasoning=joins_reasoning)
    assert stream.pumped == 1
    generated = stream.relay.generated()
    assert generated.tokens == 4 * 5 + 1
    is_plain = name == "content" or joins_reasoning
    assert generated.is_plain == is_plain
    if is_plain:
        marks = ("", "") if name == "content" else ("<think>", "</think>")
        assert generated.text == marks[0] + "".join(texts) + marks[1] + "end"


async def test_what_a_client_does_not_read_pauses_the_node(pump_in_c: None) -> None:
    stream = StreamOfOneNode(StreamRelay(wants_usage=True), buffer_bytes=4096)
    await stream.open()
    sent = [f"t{n} " + "x" * 1000 for n in range(400)]
    frames = iter(sent)
    await stream.send(HEAD)
    exchange = stream.exchange
    assert exchange is not None
    for _ in range(3):
        await stream.send(a_chunk(a_frame(next(frames))))
    assert len(stream.pool.pump) == 1
    for text in frames:
        unsent = a_chunk(a_frame(text))
        while unsent and not exchange.is_paused:
            with suppress(BlockingIOError):
                unsent = unsent[stream.node.send(unsent) :]
            await one_iteration()
        if exchange.is_paused:
            break
    assert not len(stream.pool.pump)
    assert stream.connection.due_s == float("inf")
    stream.read()
    await stream.send(unsent)
    for text in frames:
        await stream.send(a_chunk(a_frame(text)))
    await stream.send(a_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await stream.close()
    assert stream.body() == b"".join(a_frame(text) for text in sent) + b"data: [DONE]\n\n"
    assert stream.relay.generated().tokens == len(sent)


async def test_the_deadline_counts_from_the_last_token(pump_in_c: None) -> None:
    stream = StreamOfOneNode(StreamRelay(wants_usage=True))
    await stream.open()
    await stream.send(HEAD + a_chunk(a_frame("a")))
    await stream.send(a_chunk(a_frame("b")))
    exchange, connection = stream.exchange, stream.connection
    assert stream.pumped == 1 and exchange is not None
    before_s = time.monotonic()
    await stream.send(a_chunk(a_frame("c")))
    assert before_s <= exchange.last_heard_s() <= time.monotonic()
    assert connection.due_s == pytest.approx(exchange.last_heard_s() + 30.0)
    before_s = time.monotonic()
    stream.node.send(a_chunk(a_frame("d")))
    while a_frame("d") not in stream.received:
        stream.read()
    # As the sweep does at a deadline: a token has come since.
    connection.due_s = float("inf")
    connection.on_due()
    assert before_s + 30.0 <= connection.due_s <= time.monotonic() + 30.0
    assert stream.failure is None
    connection.on_due()
    await stream.settle()
    assert stream.failure is FailureCause.SILENT
    assert stream.relay.generated().text == "abcd"
    await stream.close()


@pytest.mark.parametrize("who", ["client", "node"])
async def test_a_connection_that_is_lost_ends_it(pump_in_c: None, who: str) -> None:
    stream = StreamOfOneNode(StreamRelay(wants_usage=True))
    await stream.open()
    for piece in (HEAD + a_chunk(a_frame("a")), a_chunk(a_frame("b")), a_chunk(a_frame("c"))):
        await stream.send(piece)
    assert len(stream.pool.pump) == 1
    if who == "client":
        stream.client.shutdown(socket.SHUT_RDWR)
        await stream.send(a_chunk(a_frame("d")))
    else:
        stream.node.shutdown(socket.SHUT_RDWR)
        await stream.until(lambda: stream.failure is not None)
        assert stream.failure is not None
    assert not len(stream.pool.pump)
    expected = "abcd" if who == "client" else "abc"
    await stream.close()
    assert stream.relay.generated().text == expected


@pytest.mark.parametrize(
    "frame",
    [
        a_frame("x", usage=USAGE),
        a_frame("x") + a_frame("y"),
        a_frame("x").replace(b"\n\n", b"\nid: 1\n\n"),
        a_frame("x", error={"message": "late"}),
        data_frame({"choices": [{"index": 1, "delta": {"content": "x"}}]}),
        data_frame({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}),
        data_frame({"choices": [{"index": 0, "delta": {"content": "x", "reasoning": "y"}}]}),
        data_frame({"choices": [{"index": 0, "delta": {"content": "x"}}] * 2}),
        data_frame({"choices": [{"index": 0, "delta": {"content": "", "tool_calls": [1]}}]}),
        data_frame({"content": "x", "choices": []}),
        b"data: [DONE]\n\n",
        b": content\n\n",
    ],
)
def test_a_frame_that_is_more_than_a_token_is_read(frame: bytes) -> None:
    assert pumped_frame(frame) is None


@pytest.mark.parametrize(
    "frame",
    [
        a_frame("x"),
        a_frame("x", usage=None),
        a_frame('"'),
        a_frame("x", "reasoning"),
        data_frame({"choices": [{"index": 0, "text": "x", "logprobs": None}]}),
        b"data:" + json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}}]}).encode()
        + b"\n\n",
    ],
)  # fmt: skip
def test_a_frame_of_a_token_is_recognized(frame: bytes) -> None:
    shape = pumped_frame(frame)
    assert shape is not None
    assert shape.before.endswith(b'"') and shape.behind.startswith(b'"')


def test_c_refuses_what_it_cannot_use(in_c: ModuleType) -> None:
    for arguments in ((), (-1.0,), (float("nan"),), ("1",), (1.0,)):
        with pytest.raises((TypeError, ValueError)):
            in_c.StreamPump(*arguments)
    pump = in_c.StreamPump(0.001)
    with pytest.raises(TypeError):
        pump.attach(1, 2)
    for before, behind in ((b"", b'"'), (b'"', b""), (b'"', b"x")):
        with pytest.raises(ValueError, match="frame"):
            pump.attach(0, 1, before, behind, True)
    with pytest.raises(OSError, match="descriptor"):
        pump.attach(10**6, 1, b'"', b'"', True)
    for slot in (0, -1, 10**6):
        with pytest.raises(IndexError):
            pump.take(slot)
    assert len(pump) == 0 and pump.returned() == []
    ends = [socket.socketpair() for _ in range(40)]
    slots = [pump.attach(a.fileno(), b.fileno(), b'"', b'"', True) for a, b in ends]
    assert slots == list(range(40)) and len(pump) == 40
    with pytest.raises(OSError, match="exists"):
        pump.attach(ends[0][0].fileno(), 1, b'"', b'"', True)
    count, text, heard_s = pump.take(17)
    assert (count, text) == (0, b"") and heard_s <= time.monotonic()
    with pytest.raises(IndexError):
        pump.heard_s(17)
    assert pump.attach(ends[17][0].fileno(), 1, b'"', b'"', False) == 17
    assert pump.heard_s(17) >= heard_s
    for pair in ends:
        for end in pair:
            end.close()


def test_the_compiled_path_has_the_pump() -> None:
    is_in_c = token_pump.new_pump is not None
    assert is_in_c == (importlib.util.find_spec("router.dataplane.stream_pump") is not None)
