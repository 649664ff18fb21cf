"""The usage of an answer with two legs: rewritten at any split, and nothing else changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.disaggregation.usage_rewriter import LINE_BYTES_MAX, UsageRewriter, rewrite_json

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 96},
}
STREAM = (
    b'data: {"choices":[{"delta":{"content":"a \\"usage\\" of\\n"}}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[],"usage":null}\n\n'
    b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\r\n\r\n"
    b"data: [DONE]\n\n"
)


def cached_of(data: bytes) -> int:
    return int(json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"])


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_a_stream_is_rewritten_at_any_split(cuts: list[int]) -> None:
    rewriter, out = UsageRewriter(7), b""
    edges = [0, *sorted(cuts), len(STREAM)]
    for index, start in enumerate(edges[:-1]):
        out += rewriter.feed(STREAM[start : edges[index + 1]])
    out += rewriter.flush()
    before, after = STREAM.splitlines(), out.splitlines()
    assert len(before) == len(after)
    changed = [n for n, line in enumerate(before) if after[n] != line]
    assert len(changed) == 1
    assert cached_of(after[changed[0]].removeprefix(b"data:")) == 7
    assert out.endswith(b"data: [DONE]\n\n")


def test_a_token_is_not_held_back() -> None:
    rewriter = UsageRewriter(0)
    frame = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    assert rewriter.feed(frame) == frame
    assert rewriter.feed(b"data: [DO") == b""
    assert rewriter.flush() == b"data: [DO"
    assert len(rewriter.feed(b"x" * (LINE_BYTES_MAX + 1))) == LINE_BYTES_MAX + 1


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        (USAGE, 7),
        ({"prompt_tokens": 100}, 7),
        ({"prompt_tokens": 100, "prompt_tokens_details": None}, 7),
        ({"prompt_tokens": 5}, 5),
    ],
)
def test_a_whole_answer_is_rewritten(usage: object, cached: int) -> None:
    body = json.dumps({"id": "x", "usage": usage}).encode()
    assert cached_of(rewrite_json(body, 7)) == cached


@pytest.mark.parametrize(
    "body", [b'{"id":"x"}', b'{"usage":null}', b'{"usage":', b'["usage"]', b"", b'{"usage":3}']
)
def test_an_answer_without_a_usage_stays_as_it_is(body: bytes) -> None:
    assert rewrite_json(body, 7) == body


@pytest.mark.parametrize(
    ("details", "expected"),
    [({"cached_tokens": 384}, 32), ({"cached_tokens": 16}, 16), ({}, None), (None, None)],
)
def test_what_a_broken_transfer_brought_is_not_cached(
    details: dict[str, int] | None, expected: int | None
) -> None:
    usage = {"prompt_tokens": 400, "prompt_tokens_details": details}
    body = json.dumps({"usage": usage}).encode()
    whole = json.loads(rewrite_json(body, 32, is_most=True))["usage"]["prompt_tokens_details"]
    rewriter = UsageRewriter(32, is_most=True)
    line = rewriter.feed(b"data: " + body + b"\n\n") + rewriter.flush()
    of_stream = json.loads(line.removeprefix(b"data: "))["usage"]["prompt_tokens_details"]
    assert whole == of_stream == (details if expected is None else {"cached_tokens": expected})
