"""Workers AI's bodies and OpenAI's say the same."""

import json
from typing import Any

import pytest

from isochrone.wire.errors import ApiError
from router.apis.openai.schema import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RERANK_PATH
from router.apis.workers_ai.translate import result_of, to_openai, translate_frame
from router.dataplane.sse import DONE_FRAME, data_frame


def asked(**fields: Any) -> tuple[str, dict[str, Any]]:
    path, body, _ = to_openai(json.dumps(fields).encode(), "@cf/x/tiny")
    return path, json.loads(body)


def test_a_prompt_and_messages_are_a_chat() -> None:
    user = [{"role": "user", "content": "hi"}]
    wanted = {"model": "@cf/x/tiny", "max_tokens": 256, "messages": user}
    assert asked(prompt="hi") == (CHAT_PATH, wanted)
    assert asked(messages=user) == (CHAT_PATH, wanted)
    path, body = asked(prompt="hi", raw=True, max_tokens=9, temperature=0.5, top_k=4, lora="")
    assert path == COMPLETIONS_PATH
    assert body == {
        "model": "@cf/x/tiny",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "prompt": "hi",
    }


def test_texts_are_embedded() -> None:
    assert asked(text=["a", "b"]) == (EMBEDDINGS_PATH, {"model": "@cf/x/tiny", "input": ["a", "b"]})


def test_texts_are_ranked() -> None:
    texts = [{"text": "a"}, {"text": "b"}]
    wanted = {"model": "@cf/x/tiny", "query": "q", "documents": texts}
    assert asked(query="q", contexts=texts) == (RERANK_PATH, wanted)
    assert asked(query="q", contexts=texts, top_k=1) == (RERANK_PATH, wanted | {"top_n": 1})
    answer = {"results": [{"index": 1, "relevance_score": 0.5}]}
    assert result_of(json.dumps(answer).encode()) == {"response": [{"id": 1, "score": 0.5}]}


@pytest.mark.parametrize(
    ("response_format", "wanted"),
    [({"type": "json_object"}, {"a": 1}), ({"type": "text"}, '{"a":1}'), (None, '{"a":1}')],
)
def test_json_comes_as_the_value_it_is(response_format: object, wanted: object) -> None:
    body = json.dumps({"prompt": "hi", "response_format": response_format}).encode()
    _, _, is_json = to_openai(body, "tiny")
    answer = json.dumps({"choices": [{"message": {"content": '{"a":1}'}}]}).encode()
    assert result_of(answer, is_json=is_json) == {"response": wanted}


def test_json_cut_short_stays_text() -> None:
    answer = json.dumps({"choices": [{"message": {"content": '{"a":'}}]}).encode()
    assert result_of(answer, is_json=True) == {"response": '{"a":'}


def test_a_stream_asks_for_its_usage_and_busy_is_passed_on() -> None:
    _, body = asked(prompt="hi", stream=True, options={"rejectIfBusy": True})
    assert body["stream_options"] == {"include_usage": True}
    assert body["options"] == {"rejectIfBusy": True}


def test_flat_tools_get_their_envelope() -> None:
    flat = {"name": "f", "description": "d", "parameters": {}}
    whole = {"type": "function", "function": flat}
    _, body = asked(prompt="hi", tools=[flat, whole])
    assert body["tools"] == [whole, whole]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "text": "b"},
        {"prompt": 5},
        {"text": []},
        {"max_tokens": 0},
        {"query": "a"},
        {"query": "a", "contexts": ["b"]},
        {"prompt": "a", "lora": "mine"},
    ],
)
def test_what_is_neither_is_refused_in_words(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        asked(**fields)
    assert refused.value.message.startswith("cannot ")


def test_answers_are_results() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = {"object": "chat.completion", "choices": [{"message": message}], "usage": usage}
    assert result_of(json.dumps(chat).encode()) == {
        "response": "",
        "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        "usage": usage,
    }
    listed = {"object": "list", "data": [{"embedding": [0.5, 1.0]}]}
    assert result_of(json.dumps(listed).encode()) == {"shape": [1, 2], "data": [[0.5, 1.0]]}


def test_frames() -> None:
    def chunk(**choice: Any) -> bytes:
        return data_frame({"choices": [{"index": 0, **choice}]})

    assert translate_frame(chunk(delta={"role": "assistant", "content": ""})) == b""
    assert translate_frame(chunk(delta={"content": "a"})) == b'data: {"response":"a"}\n\n'
    ended = b'data: {"response":"","finish_reason":"stop"}\n\n'
    assert translate_frame(chunk(delta={}, finish_reason="stop")) == ended
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    told = json.loads(translate_frame(data_frame({"choices": [], "usage": usage}))[6:])
    assert told == {"response": "", "usage": usage}
    assert translate_frame(DONE_FRAME) == DONE_FRAME
    for odd in (b": note", b"data: ping", b"data: [1]", b'data: {"choices":3}'):
        assert translate_frame(odd + b"\n\n") == odd + b"\n\n"
