"""The embedded engine reads the body with which a router continues an answer."""

import json
from typing import Any

import pytest

from nodeagent.engine.server.openai.request_body import (
    answer_prefix,
    read_chat,
    read_completion,
    template_messages,
)
from router.apis.openai.decode import CHAT, COMPLETION, decode, resume_body_builder

HI = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "One, "}
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("messages", "fields", "prefix"),
    [([HI], {}, "two, "), ([HI, BEGUN], CONTINUES, "One, two, ")],
)
def test_a_chat_is_continued(messages: list[Any], fields: dict[str, Any], prefix: str) -> None:
    body = json.dumps({"model": "m", "messages": messages, "stream": True, **fields}).encode()
    build = resume_body_builder(decode(body, CHAT))
    assert build is not None
    resumed = build(body, "two, ", 2)
    assert resumed is not None
    chat = read_chat(resumed, 1_000_000)
    assert template_messages(chat) == [HI]
    assert answer_prefix(chat) == prefix


def test_a_completion_is_continued() -> None:
    body = json.dumps({"model": "m", "prompt": "One, ", "stream": True}).encode()
    build = resume_body_builder(decode(body, COMPLETION))
    assert build is not None
    resumed = build(body, "two, ", 2)
    assert resumed is not None
    assert read_completion(resumed, 1_000_000).prompt == "One, two, "


@pytest.mark.parametrize(
    ("options", "can_continue"),
    [
        ({"tools": None, "logprobs": None}, True),
        ({"tools": [], "logprobs": False, "response_format": {"type": "text"}}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"logprobs": True}, False),
        ({"logprobs": 0}, False),
        *(({name: "x"}, False) for name in ("grammar", "json_schema", "regex", "ebnf")),
        ({"grammar": None, "regex": None}, True),
    ],
)
def test_only_options_with_a_state_end_an_answer(
    options: dict[str, Any], can_continue: bool
) -> None:
    """Clients send options with values that ask for nothing."""
    body = json.dumps({"model": "m", "messages": [HI], "stream": True, **options}).encode()
    build = resume_body_builder(decode(body, CHAT))
    assert build is not None
    assert (build(body, "two, ", 2) is not None) is can_continue


@pytest.mark.parametrize(("least", "rest"), [(8, 6), (2, 0), (1, 0), (None, None)])
def test_the_least_tokens_are_those_of_the_whole_answer(
    least: int | None, rest: int | None
) -> None:
    """vLLM refuses more than `max_tokens`, and would not let the rest end where it does."""
    fields = {"model": "m", "prompt": "One, ", "stream": True, "max_tokens": 8, "min_tokens": least}
    body = json.dumps(fields).encode()
    build = resume_body_builder(decode(body, COMPLETION))
    assert build is not None
    resumed = json.loads(build(body, "two, ", 2) or b"{}")
    assert (resumed["max_tokens"], resumed["min_tokens"]) == (6, rest)


@pytest.mark.parametrize("options", [None, {"continuous_usage_stats": True}])
def test_the_options_of_the_stream_stay(options: dict[str, Any] | None) -> None:
    fields = {"model": "m", "prompt": "One, ", "stream": True, "stream_options": options}
    body = json.dumps(fields).encode()
    build = resume_body_builder(decode(body, COMPLETION))
    assert build is not None
    resumed = json.loads(build(body, "two, ", 2) or b"{}")
    assert resumed["stream_options"] == {"include_usage": True, **(options or {})}
