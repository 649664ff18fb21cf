"""The events of engines that count tokens: what the router gets of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.api.request.event_tokens import EventTokens
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.request_body import CONTINUOUS_USAGE, with_fields
from router.dataplane.sse import StreamRelay

DETAILS: list[dict[str, Any]] = [
    {},
    {"prompt_tokens_details": None, "reasoning_tokens": 0},
    {"completion_tokens_details": {"reasoning_tokens": 0}},
]
"""What vLLM and SGLang have in a usage beside the three counts."""

TRICKY = '{"choices":[{"index":1,"x"}],"usage":{"completion_tokens":7}}'


def event(output: dict[str, Any], total: int, index: int = 0, details: int = 0) -> bytes:
    """Return an event after which a choice has so many tokens; -1: without the usage."""
    body: dict[str, Any] = {"id": "x", "choices": [{"index": index, **output}]}
    if total >= 0:
        counts = {"prompt_tokens": 5, "total_tokens": 5 + total, "completion_tokens": total}
        body["usage"] = {**counts, **DETAILS[details]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def content(text: str, **more: object) -> dict[str, Any]:
    return {"delta": {"content": text, **more}, "logprobs": None, "finish_reason": None}


OPENING = content("", role="assistant")
END = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":12}}\n\ndata: [DONE]\n\n'
STREAM = (
    event(OPENING, 0)
    + b": a comment\n\n"
    + event(content("a"), 1)
    + event(content(" b c"), 4, details=1)
    + event(content(""), 5)
    + event(content("\u8a9e"), 7, details=2)
    + event(content(TRICKY), 8)
    + event({"delta": {"reasoning": "hm"}}, 10)
    + event({"delta": {"tool_calls": [{"index": 0}]}}, 12)
    + event({"delta": {}, "finish_reason": "stop"}, 12)
    + END
)
EXPECTED = (
    event(OPENING, -1)
    + b": a comment\n\n"
    + event(content("a"), -1)
    + event({"generated_tokens": 3, **content(" b c")}, -1)
    + event(content(""), -1)
    + event({"generated_tokens": 3, **content("\u8a9e")}, -1)
    + event(content(TRICKY), -1)
    + event({"generated_tokens": 2, "delta": {"reasoning": "hm"}}, -1)
    + event({"generated_tokens": 2, "delta": {"tool_calls": [{"index": 0}]}}, -1)
    + event({"delta": {}, "finish_reason": "stop"}, -1)
    + END
)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_only_events_of_several_tokens_differ_from_those_without_counts(cuts: list[int]) -> None:
    events, relayed = EventTokens(), b""
    edges = [0, *sorted(cuts), len(STREAM)]
    for number, start in enumerate(edges[:-1]):
        relayed += events.feed(STREAM[start : edges[number + 1]])
    assert relayed + events.flush() == EXPECTED


def test_the_router_counts_the_tokens_that_the_engine_has_counted() -> None:
    relay = StreamRelay(wants_usage=False)
    relay.feed(EventTokens().feed(STREAM.removesuffix(END)))
    assert relay.generated().tokens == 12


def test_the_events_of_tensorrt_llm_are_counted() -> None:
    """As chat_stream_post_processor of its postprocess_handlers.py writes them."""
    head = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    opening = head + b'"choices":[{"index":0,"delta":{"role":"assistant"}}]'
    output = head + b'"choices":[{"index":0,"delta":{"content":" a b","reasoning_content":""}}]'
    usage = b',"usage":{"prompt_tokens":5,"total_tokens":%d,"completion_tokens":%d,'
    usage += b'"prompt_tokens_details":{"cached_tokens":0}}}'
    events = EventTokens()
    first = events.feed(opening + usage % (5, 0) + b" \n\n")
    assert first == opening + b"} \n\n"
    counted = output.replace(b'"index":0,', b'"index":0,"generated_tokens":2,')
    assert events.feed(output + usage % (7, 2) + b"\n\n") == counted + b"}\n\n"


def test_each_choice_has_its_own_count() -> None:
    events = EventTokens()
    assert events.feed(event(content("a b"), 2)) == event(
        {"generated_tokens": 2, **content("a b")}, -1
    )
    assert events.feed(event(content("c"), 1, 1)) == event(content("c"), -1, 1)
    assert events.feed(event(content("d"), 3)) == event(content("d"), -1)


def test_a_repeated_prompt_is_no_output() -> None:
    """vLLM's `echo` sends what the client wrote in an event before the first token."""
    echoed = event(content("the prompt"), 0)
    assert b'"generated_tokens":0,' in EventTokens().feed(echoed)


def test_a_token_is_not_held_back() -> None:
    events = EventTokens()
    assert events.feed(event(content("a"), 1)) == event(content("a"), -1)
    assert events.feed(b"data: [DO") == b""
    assert events.flush() == b"data: [DO"


@pytest.mark.parametrize(
    ("given_options", "sent"),
    [
        ("", {CONTINUOUS_USAGE: True}),
        (',"stream_options":null', {CONTINUOUS_USAGE: True}),
        (
            ',"stream_options":{"include_usage":true}',
            {"include_usage": True, CONTINUOUS_USAGE: True},
        ),
        (f',"stream_options":{{"{CONTINUOUS_USAGE}":false}}', {CONTINUOUS_USAGE: False}),
        (',"stream_options":3', 3),
    ],
)
def test_a_stream_asks_for_the_counts(given_options: str, sent: object) -> None:
    body = f'{{"stream":true{given_options}}}'.encode()
    assert json.loads(with_fields(body, {}, counts_tokens=True))["stream_options"] == sent
    whole = body.replace(b"true", b"false", 1)
    assert json.loads(with_fields(whole, {}, counts_tokens=True)) == json.loads(whole)


def test_the_engines_that_count() -> None:
    counting = {name for name, driver in DRIVERS.items() if driver.counts_tokens}
    assert counting == {"vllm", "sglang", "tensorrt_llm"}
