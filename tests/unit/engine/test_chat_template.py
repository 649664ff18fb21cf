"""Chat templates: sandboxed, given what transformers gives them, and safe from special tokens."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.chat.chat_template import ChatTemplate, ChatTemplateError
from nodeagent.engine.server.openai.request_body import (
    read_chat,
    template_arguments,
    template_messages,
)
from nodeagent.engine.tokenizer.vocabulary import SEAM
from tests.unit.engine.byte_vocabulary import VOCABULARY


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", "", "")
    with pytest.raises(ChatTemplateError):
        template.render([])
    with pytest.raises(ChatTemplateError, match="no system prompt"):
        ChatTemplate("{{ raise_exception('no system prompt') }}", "", "").render([])
    with pytest.raises(CheckpointError, match="cannot compile"):
        ChatTemplate("{% for %}", "", "")
    with pytest.raises(CheckpointError, match="cannot compile"):
        ChatTemplate("", "", "", ["x" * 100_000])


def test_a_refusal_of_an_earlier_answer_is_text() -> None:
    parts = [{"type": "text", "text": "I am sorry. "}, {"type": "refusal", "refusal": "No."}]
    chat = read_chat(
        json.dumps({"messages": [{"role": "assistant", "content": parts}]}).encode(), 10_000
    )
    assert template_messages(chat)[0]["content"] == "I am sorry. No."


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}b", "a1b"),
        ("{{ documents is none }}{{ tools is none }}", "TrueTrue"),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True) }}", '{"b": "\\u00e9", "a": 1}'),
        ("{{ {'b': 2, 'a': 1} | tojson(separators=(',', ':'), sort_keys=True) }}", '{"a":1,"b":2}'),
        ("{{ messages[0].reasoning_content }}", "hm"),
        ("{{ enable_thinking }}{{ reasoning_effort }}{{ add_generation_prompt }}", "FalselowTrue"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    ],
)
def test_a_template_gets_the_variables_that_transformers_gives(source: str, text: str) -> None:
    kwargs = {"enable_thinking": False, "add_generation_prompt": False}
    message = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    body = {"messages": [message], "reasoning_effort": "low", "chat_template_kwargs": kwargs}
    chat = read_chat(json.dumps(body).encode(), 10_000)
    assert (
        ChatTemplate(source, "", "").render(template_messages(chat), (), template_arguments(chat))
        == text
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"reasoning_effort": "none"}, "noneFalse"),
        ({"reasoning_effort": "max"}, "maxTrue"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "noneTrue",
        ),
    ],
)
def test_an_effort_switches_thinking_as_in_vllm(fields: dict[str, Any], text: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    arguments = template_arguments(read_chat(json.dumps(body).encode(), 10_000))
    template = ChatTemplate("{{ reasoning_effort }}{{ enable_thinking }}", "", "")
    assert template.render([], (), arguments) == text


@given(st.text("<end>|a", max_size=12), st.sampled_from(["{{ x }}", "{{ x | tojson }}"]))
def test_a_client_cannot_write_a_special_token(text: str, shown: str) -> None:
    special = ["<end>", "><", "nd>|", "|a|a"]
    source = "<end>{{ messages[0].content }}" + shown
    rendered = ChatTemplate(source, "", "", special).render(
        [{"role": "user", "content": text}], (), {"x": {text: [text]}}
    )
    assert rendered.startswith("<end>")
    parts = rendered.removeprefix("<end>").split(SEAM)
    assert not any(mark in part for mark in special for part in parts)
    assert "".join(parts).startswith(text)
    tokens = VOCABULARY.encode(rendered, special=False)
    assert tokens.count(256) == 1
    assert b"".join(map(VOCABULARY.token_bytes, tokens)).decode() == "".join(parts)
