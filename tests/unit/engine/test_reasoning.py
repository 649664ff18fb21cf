"""Reasoning is separated from the answer, however the text is cut into pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.chat.reasoning import (
    ReasoningSplitter,
    ReasoningUse,
    template_reasons,
    without_opening,
)
from nodeagent.engine.core.generation import GenerationDelta
from nodeagent.engine.scheduler.sequence import FinishReason
from nodeagent.engine.server.openai.response_body import CompletionResponse, ResponseChoice
from tests.unit.engine.byte_vocabulary import VOCABULARY

CASES = [
    ("<think>\nhm</think>\n\nyes", False, "\nhm", "\n\nyes"),
    ("\n<think>hm</think>yes", False, "hm", "yes"),
    ("hm</think>yes", True, "hm", "yes"),
    ("hm </thin", True, "hm </thin", ""),
    ("<think>hm", False, "hm", ""),
    ("<think></think>yes", False, "", "yes"),
    ("<thin", False, "", "<thin"),
    ("yes <think>no</think>", False, "", "yes <think>no</think>"),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("  yes", False, "", "  yes"),
]


def split(pieces: list[str], is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open, has_begun=is_open)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.flush()
    assert all(part.text for part in parts)
    reasoning = "".join(part.text for part in parts if part.is_reasoning)
    return reasoning, "".join(part.text for part in parts if not part.is_reasoning)


@pytest.mark.parametrize(("text", "is_open", "reasoning", "answer"), CASES)
def test_an_output_is_split(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    assert split([text], is_open) == (reasoning, answer)
    assert split(list(text), is_open) == (reasoning, answer)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "/", " ", "a"])), st.booleans()
)
def test_pieces_do_not_matter(pieces: list[str], is_open: bool) -> None:
    assert split(pieces, is_open) == split(["".join(pieces)], is_open)


def test_what_an_open_text_says_decides_how_it_goes_on() -> None:
    def use(prompt: str, prefix: str = "") -> bool | None:
        found = ReasoningUse.of(prompt, prefix, VOCABULARY)
        return None if found is None else found.is_open

    assert use("assistant\n") is False
    assert use("assistant\n<think>\n") is True
    assert use("assistant\n<think>\n\n</think>\n\n") is False
    assert use("assistant\n", "<think>hm") is True
    assert use("assistant\n", "<think>hm</think>yes") is None
    assert use("assistant\n", "yes") is None
    assert use("assistant\n<think>\n", "hm") is True
    assert without_opening("a<think>\n", "<think>hm") == "hm"
    assert without_opening("a", "<think>hm") == "<think>hm"


def test_a_template_tells_whether_its_model_reasons() -> None:
    assert template_reasons("{{ '<think>' }} {% if m.split('</think>') %}{% endif %}")
    assert not template_reasons("{{ messages }}")
    assert ChatTemplate("{{ '<think></think>' }}", "", "").reasons


def a_response(splitter: ReasoningSplitter | None) -> CompletionResponse:
    return CompletionResponse(
        *("id", "m", 7, True, True, False, VOCABULARY, lambda: "c"),
        [ResponseChoice(0, reasoning=splitter)],
    )


def deltas() -> list[GenerationDelta]:
    pieces = ["<think>", "h", "m", "</thi", "nk>", "ye", "s"]
    last = len(pieces) - 1
    return [
        GenerationDelta(0, piece, None, at + 1, 0, FinishReason.STOP if at == last else None)
        for at, piece in enumerate(pieces)
    ]


def test_a_complete_answer_has_reasoning_of_its_own() -> None:
    response = a_response(ReasoningSplitter())
    for delta in deltas():
        response.collect(delta)
    body = json.loads(response.complete_body(3))
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_a_stream_has_reasoning_of_its_own() -> None:
    response = a_response(ReasoningSplitter())
    frames = [frame for delta in deltas() for frame in response.chunks(delta)]
    parts: list[Any] = [json.loads(frame[6:])["choices"][0]["delta"] for frame in frames]
    assert "".join(part.get("reasoning_content", "") for part in parts) == "hm"
    assert "".join(part.get("content", "") for part in parts) == "yes"


def test_a_model_without_reasoning_is_not_changed() -> None:
    response = a_response(None)
    for delta in deltas():
        response.collect(delta)
    body = json.loads(response.complete_body(3))
    assert body["choices"][0]["message"]["content"] == "<think>hm</think>yes"
    assert "completion_tokens_details" not in body["usage"]
