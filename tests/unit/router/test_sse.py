"""StreamRelay come through byte-exact, wherever the network cuts them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dataplane.exchange import AttemptFailed
from router.dataplane.response_checks import read_usage
from router.dataplane.sse import (
    FRAME_BYTES_MAX,
    UNREAD_BYTES_MAX,
    MalformedStream,
    StreamRelay,
    classify,
    data_frame,
    frame_data,
    split_frames,
)
from router.dataplane.usage import UsageCount, add_cached_tokens

FRAMES = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"h\xc3\xa9 \\n\\n data: "}}]}\n\n',
    b": keep-alive\n\n",
    b'event: x\r\nid: 7\r\ndata: {"choices":[{"delta":{"content":"b"}}],"usage":null}\r\n\r\n',
    b'data:{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":1}}}\n\n',
    b"data: [DONE]\n\n",
]
USAGE = UsageCount(5, 2, 1)


def token(text: str) -> bytes:
    return data_frame({"choices": [{"index": 0, "delta": {"content": text}}]})


def test_a_stream_cut_at_every_byte_is_passed_byte_exact() -> None:
    stream = b"".join(FRAMES)
    for cut in range(len(stream) + 1):
        frames = StreamRelay(wants_usage=True)
        assert frames.feed(stream[:cut]) + frames.feed(stream[cut:]) == stream
        assert frames.is_done
        assert frames.usage == USAGE
        assert frames.generated()[:3] == (2, "h\u00e9 \n\n data: b", True)


def test_byte_by_byte_too() -> None:
    frames = StreamRelay(wants_usage=False)
    shown = b"".join(frames.feed(bytes([byte])) for byte in b"".join(FRAMES))
    assert shown == b"".join(FRAMES[:4] + FRAMES[5:])
    assert frames.usage == USAGE


@settings(deadline=None, max_examples=150)
@given(st.data(), st.lists(st.sampled_from(FRAMES[:5]), max_size=8))
def test_a_stream_cut_anyhow_is_passed_byte_exact(data: st.DataObject, sent: list[bytes]) -> None:
    stream = whole = b"".join(sent)
    frames = StreamRelay(wants_usage=True)
    seen = b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        seen += frames.feed(stream[:size])
        stream = stream[size:]
    assert seen == whole
    assert split_frames(whole) == sent


def test_what_a_frame_is() -> None:
    kinds = [classify(frame) for frame in FRAMES]
    assert [kind.tokens for kind in kinds] == [0, 1, 0, 1, 0, 0]
    assert [kind.is_usage_only for kind in kinds] == [False, False, False, False, True, False]
    assert [kind.is_done for kind in kinds] == [False] * 5 + [True]
    assert kinds[4].usage == USAGE
    assert classify(b'data: {"error":{"message":"x"}}\n\n').is_error


def test_a_text_that_speaks_of_usage_is_no_usage() -> None:
    frame = data_frame({"choices": [{"delta": {"content": 'say "usage": {5} [DONE] "error"'}}]})
    kind = classify(frame)
    assert (kind.usage, kind.tokens) == (None, 1)
    frames = StreamRelay(wants_usage=False)
    assert frames.feed(token("a")) + frames.feed(frame) == token("a") + frame
    assert not frames.is_over
    assert frames.generated().tokens == 2


def test_lines_of_data_are_joined() -> None:
    assert frame_data(b"data: a\ndata: b\n\n") == b"a\nb"


@pytest.mark.parametrize(
    "frame",
    [b'data: {"usage": nonsense\n\n', b'data: {"error" oops\n\n', b'data: ["usage"]\n\n'],
)
def test_garbage_is_told(frame: bytes) -> None:
    with pytest.raises(MalformedStream):
        classify(frame)


def test_a_frame_without_end_is_bounded() -> None:
    frames = StreamRelay(wants_usage=False)
    for _ in range(FRAME_BYTES_MAX // 65_536):
        assert frames.feed(b"x" * 65_536) == b""
    with pytest.raises(MalformedStream):
        frames.feed(b"x")


def test_what_is_kept_of_a_long_stream_is_its_text() -> None:
    frames = StreamRelay(wants_usage=False)
    for n in range(5000):
        frames.feed(token(f"t{n} "))
        assert frames._unread_bytes <= UNREAD_BYTES_MAX
    said = frames.generated()
    assert said.tokens == 5000
    assert said.text == "".join(f"t{n} " for n in range(5000))


def test_another_nodes_frames_follow_as_if_they_were_one_stream() -> None:
    frames = StreamRelay(wants_usage=True)
    frames.feed(FRAMES[0] + token("a") + token("b") + b'data: {"choices":[{"del')
    frames.resume()
    assert not frames.has_begun
    shown = frames.feed(FRAMES[0] + token("c"))
    assert shown == token("c")
    assert frames.has_begun
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    told = json.loads(frames.feed(data_frame({"choices": [], "usage": usage}))[6:])["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (10, 3, 13)
    assert told["prompt_tokens_details"] == {"cached_tokens": 0}
    assert frames.generated() == (3, "abc", True, None)


@pytest.mark.parametrize(
    "delta", [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}], ids=["tools", "reasons"]
)
def test_what_is_not_plain_text_is_known_as_that(delta: dict[str, object]) -> None:
    frames = StreamRelay(wants_usage=False)
    frames.feed(data_frame({"choices": [{"delta": delta}]}))
    assert frames.generated()[:3] == (1, "", False)


@given(st.none() | st.dictionaries(st.sampled_from(["a", "cached_tokens"]), st.integers(0, 9)))
def test_cached_tokens_are_there_afterwards(details: dict[str, int] | None) -> None:
    body = {"usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}
    before = json.dumps(body)
    usage, whole = read_usage("n", before.encode())
    assert usage == UsageCount(1, 0, (details or {}).get("cached_tokens", 0))
    changed = add_cached_tokens(body)
    assert json.loads(whole) == body
    assert isinstance(body["usage"]["prompt_tokens_details"]["cached_tokens"], int)  # type: ignore[index]
    assert changed is (json.dumps(body) != before)


def test_whole_answers_are_read_as_far_as_needed() -> None:
    told = b'{"x":1.50,"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":'
    told += b'{"cached_tokens":1}}}'
    assert read_usage("n", told) == (USAGE, told)
    assert read_usage("n", b'{"a":1}') == (None, b'{"a":1}')
    odd = b'{"usage":{"prompt_tokens":"many"}}'
    assert read_usage("n", odd)[0] == UsageCount(0, 0, 0)
    for garbage in (b"", b"[]", b"\xff", b'{"usage":', b"[" * 100_000):
        with pytest.raises(AttemptFailed):
            read_usage("n", garbage)
