"""Workers AI requests and responses are translated to and from OpenAI's."""

import json
from typing import Any

import msgspec
import pytest

from isochrone.wire.errors import ApiError
from router.apis.openai.schema import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH, RERANK_PATH
from router.apis.workers_ai.translate import result_of, to_openai, translate_frame
from router.dataplane.sse import DONE_FRAME, data_frame


def translate(**fields: Any) -> tuple[str, dict[str, Any]]:
    call = to_openai(json.dumps(fields).encode(), "@cf/x/tiny")
    return call.path, json.loads(call.body)


def test_a_prompt_and_messages_become_a_chat() -> None:
    user = [{"role": "user", "content": "hi"}]
    expected = {"model": "@cf/x/tiny", "max_tokens": 256, "messages": user}
    assert translate(prompt="hi") == (CHAT_PATH, expected)
    assert translate(messages=user) == (CHAT_PATH, expected)
    path, body = translate(prompt="hi", raw=True, max_tokens=9, temperature=0.5, top_k=4, lora="")
    assert path == COMPLETIONS_PATH
    assert body == {
        "model": "@cf/x/tiny",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "prompt": "hi",
    }


@pytest.mark.parametrize("task", [{"text": "hi", "target_lang": "fr"}, {"input_text": "hi"}])
def test_a_translation_and_a_summary_have_the_clients_limit(task: dict[str, str]) -> None:
    assert "max_tokens" not in translate(**task)[1]
    assert translate(**task, max_tokens=9)[1]["max_tokens"] == 9


def test_a_text_becomes_an_embedding_request() -> None:
    assert translate(text=["a", "b"]) == (
        EMBEDDINGS_PATH,
        {"model": "@cf/x/tiny", "input": ["a", "b"]},
    )


def test_a_query_becomes_a_reranking_request() -> None:
    texts = [{"text": "a"}, {"text": "b"}]
    expected = {"model": "@cf/x/tiny", "query": "q", "documents": texts}
    assert translate(query="q", contexts=texts) == (RERANK_PATH, expected)
    assert translate(query="q", contexts=texts, top_k=1) == (RERANK_PATH, expected | {"top_n": 1})
    answer = {"results": [{"index": 1, "relevance_score": 0.5}]}
    assert result_of(json.dumps(answer).encode()) == {"response": [{"id": 1, "score": 0.5}]}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [({"type": "json_object"}, {"a": 1}), ({"type": "text"}, '{"a":1}'), (None, '{"a":1}')],
)
def test_a_json_answer_is_returned_as_a_value(response_format: object, expected: object) -> None:
    body = json.dumps({"prompt": "hi", "response_format": response_format}).encode()
    is_json = to_openai(body, "tiny").is_json
    answer = json.dumps({"choices": [{"message": {"content": '{"a":1}'}}]}).encode()
    assert result_of(answer, is_json=is_json) == {"response": expected}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"type": "object"}, {"name": "answer", "schema": {"type": "object"}}),
        ({}, {"name": "answer", "schema": {}}),
        ({"name": "n", "schema": {}}, {"name": "n", "schema": {}}),
        ({"schema": {}, "strict": True}, {"schema": {}, "strict": True}),
        ("no schema", "no schema"),
    ],
)
def test_a_schema_gets_openais_form(given: object, sent: object) -> None:
    _, body = translate(prompt="hi", response_format={"type": "json_schema", "json_schema": given})
    assert body["response_format"] == {"type": "json_schema", "json_schema": sent}


@pytest.mark.parametrize("fields", [{}, {"json_schema": None}])
def test_a_format_without_its_schema_is_any_object(fields: dict[str, None]) -> None:
    """`workers-ai-provider` sends it where a program asks for any JSON."""
    _, body = translate(prompt="hi", response_format={"type": "json_schema", **fields})
    assert body["response_format"] == {"type": "json_object"}


def test_incomplete_json_stays_text() -> None:
    answer = json.dumps({"choices": [{"message": {"content": '{"a":'}}]}).encode()
    assert result_of(answer, is_json=True) == {"response": '{"a":'}


def test_a_stream_asks_for_its_usage_and_options_are_copied() -> None:
    _, body = translate(prompt="hi", stream=True, options={"rejectIfBusy": True})
    assert body["stream_options"] == {"include_usage": True}
    assert body["options"] == {"rejectIfBusy": True}


def test_flat_tools_get_openais_envelope() -> None:
    flat = {"name": "f", "description": "d", "parameters": {}}
    whole = {"type": "function", "function": flat}
    _, body = translate(prompt="hi", tools=[flat, whole])
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
        {"prompt": "a", "lora": "not:a name"},
    ],
)
def test_an_invalid_request_is_refused_with_a_reason(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        translate(**fields)
    assert refused.value.message.startswith("cannot ")


@pytest.mark.parametrize("field", ["requests", "request_id"])
def test_the_body_of_a_queued_run_without_the_parameter_says_what_is_missing(field: str) -> None:
    with pytest.raises(ApiError, match=r"it has none; for queued runs add \?queueRequest=true"):
        translate(**{field: "r"})


def test_complete_responses_become_results() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    chat = {"object": "chat.completion", "choices": [choice], "usage": usage}
    assert result_of(json.dumps(chat).encode()) == {
        "response": "",
        "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
        "finish_reason": "tool_calls",
        "usage": usage,
    }
    # Arguments that are no JSON, or nested too deeply to be read, stay text.
    for arguments in ("{", "[" * 5000):
        call["function"] = {"name": "f", "arguments": arguments}
        assert result_of(json.dumps(chat).encode())["tool_calls"] == [call["function"]]


def test_the_numbers_of_embeddings_stay_as_the_engine_wrote_them() -> None:
    """Two million floats that were read and written again stopped the router for a second."""
    listed = b'{"object":"list","data":[{"index":0,"embedding":[0.50, 1e-3]},{"embedding":[]}]}'
    expected = b'{"shape":[2,2],"data":[[0.50, 1e-3],[]]}'
    assert msgspec.json.encode(result_of(listed)) == expected
    assert result_of(b'{"object":"list","data":[]}') == {"shape": [0, 0], "data": []}


def test_frames_are_translated() -> None:
    def chunk(**choice: Any) -> bytes:
        return data_frame({"choices": [{"index": 0, **choice}]})

    assert translate_frame(chunk(delta={"role": "assistant", "content": ""})) == b""
    assert translate_frame(chunk(delta={"content": "a"})) == b'data: {"response":"a"}\n\n'
    last = b'data: {"response":"","finish_reason":"stop"}\n\n'
    assert translate_frame(chunk(delta={}, finish_reason="stop")) == last
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    frame = json.loads(translate_frame(data_frame({"choices": [], "usage": usage}))[6:])
    assert frame == {"response": "", "usage": usage}
    assert translate_frame(DONE_FRAME) == DONE_FRAME
    for odd in (b": note", b"data: ping", b"data: [1]", b'data: {"choices":3}'):
        assert translate_frame(odd + b"\n\n") == odd + b"\n\n"


def test_fields_of_generation_are_copied() -> None:
    fields: dict[str, Any] = {
        "stop": ["."],
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
    }
    _, body = translate(prompt="hi", max_completion_tokens=9, lora=None, **fields)
    assert body == {
        "model": "@cf/x/tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "raw"),
        ({"text": "a", "max_tokens": 3}, "max_tokens"),
        ({"query": "a", "contexts": [{"text": "b"}], "stop": "x"}, "stop"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ApiError, match=f"cannot use field '{named}'"):
        translate(**fields)


def test_reasoning_is_returned() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    body = json.dumps({"choices": [{"message": message}]}).encode()
    assert result_of(body) == {"response": "4", "reasoning_content": "2 + 2"}
    for name in ("reasoning_content", "reasoning"):
        frame = data_frame({"choices": [{"index": 0, "delta": {name: "2"}}]})
        assert json.loads(translate_frame(frame)[6:]) == {"response": "", "reasoning_content": "2"}
