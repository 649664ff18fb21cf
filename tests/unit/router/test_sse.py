"""Frames come through byte-exact, wherever the network cuts them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dataplane.sse import (
    FRAME_BYTES_MAX,
    BrokenStream,
    FrameSplitter,
    classify,
    data_frame,
    data_of,
    with_cached_tokens,
)

FRAMES = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"h\xc3\xa9 \\n\\n data: "}}]}\n\n',
    b": keep-alive\n\n",
    b'event: x\r\nid: 7\r\ndata: {"choices":[{"delta":{"content":"b"}}],"usage":null}\r\n\r\n',
    b'data:{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]


def test_a_stream_cut_at_every_byte_gives_the_same_frames() -> None:
    stream = b"".join(FRAMES)
    for cut in range(len(stream) + 1):
        splitter = FrameSplitter()
        assert [*splitter.feed(stream[:cut]), *splitter.feed(stream[cut:])] == FRAMES
        assert splitter.rest == b""


@settings(deadline=None, max_examples=150)
@given(st.data(), st.lists(st.sampled_from(FRAMES), max_size=8), st.binary(max_size=20))
def test_a_stream_cut_anyhow_is_passed_byte_exact(
    data: st.DataObject, frames: list[bytes], tail: bytes
) -> None:
    stream = b"".join(frames) + tail
    splitter = FrameSplitter()
    seen = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        seen += list(splitter.feed(stream[:size]))
        stream = stream[size:]
    assert seen[: len(frames)] == frames
    assert b"".join(seen) + splitter.rest == b"".join(frames) + tail


def test_what_a_frame_is() -> None:
    kinds = [classify(frame) for frame in FRAMES]
    assert [kind.tokens for kind in kinds] == [0, 1, 0, 1, 0, 0]
    assert [kind.is_usage_only for kind in kinds] == [False, False, False, False, True, False]
    assert [kind.is_done for kind in kinds] == [False] * 5 + [True]
    usage = kinds[4].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (5, 2, 0)
    assert classify(b'data: {"error":{"message":"x"}}\n\n').is_error


def test_a_text_that_speaks_of_usage_is_no_usage() -> None:
    frame = data_frame({"choices": [{"delta": {"content": 'say "usage": 5'}}]})
    kind = classify(frame)
    assert (kind.usage, kind.tokens) == (None, 1)


def test_lines_of_data_are_joined() -> None:
    assert data_of(b"data: a\ndata: b\n\n") == b"a\nb"


@pytest.mark.parametrize(
    "frame",
    [b'data: {"usage": nonsense\n\n', b'data: {"error" oops\n\n', b'data: ["usage"]\n\n'],
)
def test_garbage_is_told(frame: bytes) -> None:
    with pytest.raises(BrokenStream):
        classify(frame)


def test_a_frame_without_end_is_bounded() -> None:
    splitter = FrameSplitter()
    for _ in range(FRAME_BYTES_MAX // 65_536):
        assert list(splitter.feed(b"x" * 65_536)) == []
    with pytest.raises(BrokenStream):
        list(splitter.feed(b"x"))


@given(st.none() | st.dictionaries(st.sampled_from(["a", "cached_tokens"]), st.integers(0, 9)))
def test_cached_tokens_are_there_afterwards(details: dict[str, int] | None) -> None:
    body = {"usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}
    before = json.dumps(body)
    changed = with_cached_tokens(body)
    assert isinstance(body["usage"]["prompt_tokens_details"]["cached_tokens"], int)  # type: ignore[index]
    assert changed is (json.dumps(body) != before)
