"""Frames are relayed byte-exact, wherever the network splits them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dataplane.exchange import AttemptFailed
from router.dataplane.generated_text import TEXT_CHARS_MAX
from router.dataplane.response_checks import read_usage
from router.dataplane.sse import (
    DONE_FRAME,
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


def test_a_stream_split_at_any_byte_is_relayed_byte_exact() -> None:
    stream = b"".join(FRAMES)
    for cut in range(len(stream) + 1):
        relay = StreamRelay(wants_usage=True)
        assert relay.feed(stream[:cut]) + relay.feed(stream[cut:]) == stream
        assert relay.is_done
        assert relay.usage == USAGE
        assert relay.generated()[:3] == (2, "h\u00e9 \n\n data: b", True)


def test_a_stream_that_arrives_byte_by_byte_is_relayed_whole() -> None:
    relay = StreamRelay(wants_usage=False)
    relayed = b"".join(relay.feed(bytes([byte])) for byte in b"".join(FRAMES))
    assert relayed == b"".join(FRAMES[:4] + FRAMES[5:])
    assert relay.usage == USAGE


@settings(deadline=None, max_examples=150)
@given(st.data(), st.lists(st.sampled_from(FRAMES[:5]), max_size=8))
def test_a_stream_split_anywhere_is_relayed_byte_exact(
    data: st.DataObject, sent: list[bytes]
) -> None:
    stream = whole = b"".join(sent)
    relay = StreamRelay(wants_usage=True)
    received = b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += relay.feed(stream[:size])
        stream = stream[size:]
    assert received == whole
    assert split_frames(whole) == sent


@pytest.mark.parametrize("more", [b"\n", b"\n\n", b"\n\n\n"], ids=["one", "two", "three"])
@pytest.mark.parametrize("first", [FRAMES[0], FRAMES[2], FRAMES[4]], ids=["role", "ping", "usage"])
def test_more_than_one_blank_line_behind_a_frame_is_relayed(first: bytes, more: bytes) -> None:
    stream = first + more
    for cut in range(len(stream) + 1):
        relay = StreamRelay(wants_usage=True)
        relayed = relay.feed(stream[:cut]) + relay.feed(stream[cut:])
        assert relayed + relay.feed(token("a")) == stream + token("a")
        relay.resume()
        assert relay.feed(token("b") + more + token("c")) == token("b") + more + token("c")
        assert relay.generated().text == "abc"


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7])
def test_any_blank_line_ends_a_frame_that_comes_in_small_pieces(
    blank: bytes, piece_bytes: int
) -> None:
    frames = [token(text).removesuffix(b"\n\n") + blank for text in ("a", "bb", "")]
    sent, relay = b"".join(frames), StreamRelay(wants_usage=True)
    ends = [sum(map(len, frames[: n + 1])) for n in range(len(frames))]
    received = 0
    for start in range(0, len(sent), piece_bytes):
        fed = min(start + piece_bytes, len(sent))
        received += len(relay.feed(sent[start:fed]))
        # A frame is relayed once its last byte is there, whatever came with that.
        assert received == max((end for end in ends if end <= fed), default=0)


def test_each_kind_of_frame_is_recognized() -> None:
    kinds = [classify(frame) for frame in FRAMES]
    assert [kind.tokens for kind in kinds] == [0, 1, 0, 1, 0, 0]
    assert [kind.is_usage_only for kind in kinds] == [False, False, False, False, True, False]
    assert [kind.is_done for kind in kinds] == [False] * 5 + [True]
    assert kinds[4].usage == USAGE
    assert classify(b'data: {"error":{"message":"x"}}\n\n').is_error


def test_generated_text_that_mentions_usage_is_not_a_usage_frame() -> None:
    frame = data_frame({"choices": [{"delta": {"content": 'say "usage": {5} [DONE] "error"'}}]})
    kind = classify(frame)
    assert (kind.usage, kind.tokens) == (None, 1)
    relay = StreamRelay(wants_usage=False)
    assert relay.feed(token("a")) + relay.feed(frame) == token("a") + frame
    assert not relay.is_over
    assert relay.generated().tokens == 2


def test_data_lines_of_a_frame_are_joined() -> None:
    assert frame_data(b"data: a\ndata: b\n\n") == b"a\nb"


@pytest.mark.parametrize(
    "frame",
    [b'data: {"usage": nonsense\n\n', b'data: {"error" oops\n\n', b'data: ["usage"]\n\n'],
)
def test_a_frame_that_must_be_json_and_is_not_raises(frame: bytes) -> None:
    with pytest.raises(MalformedStream):
        classify(frame)


def test_an_endless_frame_is_refused() -> None:
    relay = StreamRelay(wants_usage=False)
    for _ in range(FRAME_BYTES_MAX // 65_536):
        assert relay.feed(b"x" * 65_536) == b""
    with pytest.raises(MalformedStream):
        relay.feed(b"x")


def test_of_a_long_stream_only_the_text_is_kept() -> None:
    relay = StreamRelay(wants_usage=False)
    for n in range(5000):
        relay.feed(token(f"t{n} "))
        assert relay._unread_bytes <= UNREAD_BYTES_MAX
    generated = relay.generated()
    assert generated.tokens == 5000
    assert generated.text == "".join(f"t{n} " for n in range(5000))


def test_a_stream_without_end_keeps_no_text_and_cannot_be_continued() -> None:
    relay = StreamRelay(wants_usage=False)
    long = "x" * 65_536
    relay.feed(token(long))
    assert relay.is_plain and relay.generated().text == long
    for _ in range(2 * TEXT_CHARS_MAX // len(long)):
        relay.feed(token(long))
    generated = relay.generated()
    assert (generated.is_plain, generated.text) == (False, "")
    assert generated.tokens == 1 + 2 * TEXT_CHARS_MAX // len(long)


def test_a_long_stream_is_decoded_a_token_at_a_time() -> None:
    # Streams that began together would otherwise all decode as much at the same moment.
    relay, kept = StreamRelay(wants_usage=False), 0
    for number in range(2000):
        frame = token(f"{number} ")
        relay.feed(frame)
        kept = min(kept + len(frame), UNREAD_BYTES_MAX)
        assert relay._unread_bytes > kept - 2 * len(frame)
    assert relay.generated().text == "".join(f"{number} " for number in range(2000))
    assert relay.generated().tokens == 2000


def a_delta(**fields: str) -> bytes:
    return data_frame({"choices": [{"index": 0, "delta": fields}]})


@pytest.mark.parametrize(
    ("deltas", "text"),
    [
        ([{"reasoning_content": "hm"}], "<think>hm"),
        (
            [{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "yes"}],
            "<think>hm</think>yes",
        ),
        ([{"content": "yes"}], "yes"),
    ],
)
def test_reasoning_is_joined_for_an_engine_that_separates_it_again(
    deltas: list[dict[str, str]], text: str
) -> None:
    relay = StreamRelay(wants_usage=False, joins_reasoning=True)
    for delta in deltas:
        relay.feed(a_delta(**delta))
    generated = relay.generated()
    assert (generated.text, generated.is_plain, generated.tokens) == (text, True, len(deltas))
    assert generated.has_reasoning == ("<think>" in text)


def test_reasoning_of_other_engines_and_after_an_answer_is_not_joined() -> None:
    other = StreamRelay(wants_usage=False)
    other.feed(a_delta(reasoning_content="hm"))
    assert not other.generated().is_plain
    late = StreamRelay(wants_usage=False, joins_reasoning=True)
    late.feed(a_delta(content="yes") + a_delta(reasoning_content="hm"))
    assert not late.generated().is_plain


def test_the_frames_of_another_node_continue_the_same_stream() -> None:
    relay = StreamRelay(wants_usage=True)
    relay.feed(FRAMES[0] + token("a") + token("b") + b'data: {"choices":[{"del')
    relay.resume()
    assert not relay.has_begun
    relayed = relay.feed(FRAMES[0] + token("c"))
    assert relayed == token("c")
    assert relay.has_begun
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    reported = json.loads(relay.feed(data_frame({"choices": [], "usage": usage}))[6:])["usage"]
    assert reported["prompt_tokens"] == 10
    assert reported["completion_tokens"] == 3
    assert reported["total_tokens"] == 13
    assert reported["prompt_tokens_details"] == {"cached_tokens": 0}
    assert relay.generated() == (3, "abc", True, None, False)


def counted_by_engine(delta: dict[str, str], output_tokens: int) -> bytes:
    """Return a frame of vLLM with `stream_options.continuous_usage_stats`."""
    usage = {"prompt_tokens": 10, "completion_tokens": output_tokens, "total_tokens": 10}
    return data_frame({"choices": [{"delta": delta}], "usage": usage})


def test_frames_with_several_tokens_count_as_the_engine_counts_them() -> None:
    """Counted as one each, the rest of the answer could exceed the client's `max_tokens`."""
    opening = counted_by_engine({"role": "assistant", "content": ""}, 0)
    relay = StreamRelay(wants_usage=True)
    relay.feed(opening)
    assert not relay.has_begun
    relay.feed(counted_by_engine({"content": "a b"}, 2) + counted_by_engine({"content": " c"}, 3))
    assert relay.generated()[:3] == (3, "a b c", True)
    relay.resume()
    assert relay.feed(opening) == b""
    assert not relay.has_begun
    relay.feed(counted_by_engine({"content": " d e"}, 2))
    assert relay.has_begun
    assert relay.generated()[:3] == (5, "a b c d e", True)
    assert relay.usage is not None
    assert relay.usage.output_tokens == 5


def test_the_embedded_engine_says_how_many_tokens_a_frame_has() -> None:
    """A character of several tokens has one frame."""

    def of_tokens(text: str, tokens: int) -> bytes:
        choice = {"delta": {"content": text}, "generated_tokens": tokens}
        return data_frame({"choices": [choice]})

    relay = StreamRelay(wants_usage=False)
    assert relay.feed(token("a") + of_tokens("\u8a9e", 3) + token("b") + of_tokens("c", 0))
    assert relay.generated()[:2] == (5, "a\u8a9ebc")
    assert relay.pumped_frame(of_tokens("\u8a9e", 3)) is None
    assert relay.pumped_frame(token("b")) is not None


def test_what_another_node_continues_keeps_the_id_and_the_time() -> None:
    def named(name: str, created: int, text: str) -> bytes:
        head = {"id": name, "created": created}
        return data_frame({**head, "choices": [{"delta": {"content": text}}], "usage": None})

    says_id = 'it says "id":"x" and "created":7'
    relay = StreamRelay(wants_usage=True)
    relay.feed(b": nothing yet\n\n" + named("first \\ 1", 5, "a") + named("first \\ 1", 5, "b"))
    relay.resume()
    relayed = relay.feed(named("second", 6, says_id) + named("second", 6, "d"))
    assert relayed == named("first \\ 1", 5, says_id) + named("first \\ 1", 5, "d")
    assert relay.feed(named("second", 6, "e")) == named("first \\ 1", 5, "e")
    assert relay.pumped_frame(named("second", 6, "e")) is None
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    last = json.loads(relay.feed(data_frame({"id": "second", "choices": [], "usage": usage}))[6:])
    assert relay.head.fields() == {"id": "first \\ 1", "created": 5}
    assert (last["id"], last["usage"]["completion_tokens"]) == ("first \\ 1", 3)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_stream_that_ends_well_after_an_error_event_is_not_done(is_split: bool) -> None:
    """vLLM whose engine core has died sends an error event and then `[DONE]`."""
    relay = StreamRelay(wants_usage=True)
    relay.feed(FRAMES[0] + token("a"))
    failure = data_frame({"error": {"message": "EngineCore encountered an issue", "code": 500}})
    parts = [failure, DONE_FRAME] if is_split else [failure + DONE_FRAME]
    assert b"".join(relay.feed(part) for part in parts) == b""
    assert (relay.has_failed, relay.is_done) == (True, False)
    relay.resume()
    assert relay.feed(FRAMES[0] + token("b") + DONE_FRAME) == token("b") + DONE_FRAME
    assert relay.is_done


@pytest.mark.parametrize(
    "delta",
    [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}, {"reasoning": "hm"}],
    ids=["tools", "reasons", "reasons in vLLM"],
)
def test_output_other_than_text_is_not_plain(delta: dict[str, object]) -> None:
    relay = StreamRelay(wants_usage=False)
    relay.feed(data_frame({"choices": [{"delta": delta}]}))
    assert relay.generated()[:3] == (1, "", False)


@given(st.none() | st.dictionaries(st.sampled_from(["a", "cached_tokens"]), st.integers(0, 9)))
def test_cached_tokens_are_added_where_they_are_missing(details: dict[str, int] | None) -> None:
    body = {"usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}
    before = json.dumps(body)
    usage, whole = read_usage("n", before.encode())
    assert usage == UsageCount(1, 0, (details or {}).get("cached_tokens", 0))
    is_changed = add_cached_tokens(body)
    assert json.loads(whole) == body
    assert isinstance(body["usage"]["prompt_tokens_details"]["cached_tokens"], int)  # type: ignore[index]
    assert is_changed is (json.dumps(body) != before)


def test_the_usage_of_a_complete_response_is_read() -> None:
    body = b'{"x":1.50,"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":'
    body += b'{"cached_tokens":1}}}'
    assert read_usage("n", body) == (USAGE, body)
    assert read_usage("n", b'{"a":1}') == (None, b'{"a":1}')
    odd = b'{"usage":{"prompt_tokens":"many"}}'
    assert read_usage("n", odd)[0] == UsageCount(0, 0, 0)
    for garbage in (b"", b"[]", b"\xff", b'{"usage":', b"[" * 100_000):
        with pytest.raises(AttemptFailed):
            read_usage("n", garbage)
