"""Request bodies: invalid values and unknown fields are refused, options are translated."""

import json
from typing import Any

import msgspec
import pytest
from openai.types import chat as chat_types
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.shared_params import FunctionDefinition

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.headers import SESSION_AFFINITY
from nodeagent.engine.server.openai.generation_options import generation_options
from nodeagent.engine.server.openai.request_body import (
    MessageSpec,
    PredictionSpec,
    completion_prompts,
    read_chat,
    read_completion,
    template_messages,
)
from nodeagent.engine.server.openai.request_headers import scheduling_params
from nodeagent.engine.server.openai.tool_fields import (
    AllowedToolsSpec,
    FunctionSpec,
    ToolCallSpec,
    ToolChoiceSpec,
    ToolSpec,
)

LIMIT = 1_000_000
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, **fields}).encode()


def read_completely(body: bytes) -> None:
    read = read_chat(body, LIMIT)
    template_messages(read)
    generation_options(read)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "cannot use the request body: it is empty"),
        (b"{", "its JSON ends early"),
        (b"[]", "expected `object`"),
        (b"\xff", "cannot use the request body"),
        (b'{"messages":' + b"[" * 100_000, r"cannot use field 'messages\[0\]'"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"messages":[]}', "field 'x'"),
        (b"{}", "messages"),
        (chat(messages=[]), "length >= 1"),
        (chat(messages="hi"), "cannot use field 'messages': expected `array`, got `str`"),
        (chat(messages=[{"role": "wizard", "content": "x"}]), "role"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "of type 'text'",
        ),
        (chat(temperature="hot"), "temperature"),
        (chat(wizard=1), "cannot use field 'wizard': it is not supported"),
        (chat(stream_options={"wizard": 1}), "cannot use field 'stream_options.wizard'"),
        (chat(temperature=3), "temperature"),
        (chat(top_p=0), "top_p"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(seed=2**64), "seed"),
        (chat(n=0), "n"),
        (chat(functions=[{"name": "f"}]), "cannot use field 'functions'"),
        (chat(min_tokens=-1), "min_tokens"),
        (chat(length_penalty=1.5), "length_penalty"),
        (chat(truncate_prompt_tokens=100), "truncate_prompt_tokens"),
        (chat(bad_words=["x"]), "bad_words"),
        (chat(regex="x+"), "regex"),
        (chat(grammar='root ::= "x"'), "grammar"),
        (chat(chat_template="{{ 1 }}"), "chat_template"),
        (chat(include_stop_str_in_output=True), "include_stop_str_in_output"),
        (chat(web_search_options={"user_location": None}), "web_search_options"),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
        (
            chat(reasoning_effort="extreme"),
            "cannot use field 'reasoning_effort': 'extreme' is not one of 'high', 'low', 'max',"
            " 'medium', 'minimal', 'none', 'xhigh'",
        ),
        (chat(modalities=["text", "audio"]), "modalities"),
        (chat(tools=[{"type": "web_search"}]), "web_search"),
        (chat(tool_choice="perhaps"), "tool_choice"),
        (chat(messages=[{"role": "assistant", "tool_calls": [{"id": "x"}]}]), "tool_calls"),
        (chat(response_format={"type": "yaml"}), "response_format"),
        (chat(top_logprobs=2), "it needs 'logprobs'"),
        (chat(logit_bias={"x": 1}), "logit_bias"),
        (chat(logit_bias={"1": 1000}), "logit_bias"),
        (chat(stop=["x"] * 17), "cannot use field 'stop'"),
    ],
)
def test_an_invalid_chat_is_refused_with_a_message(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read_completely(body)
    assert str(caught.value).startswith("cannot ")
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2]], [[1], [2]]),
        (["a", [2], []], ["a", [2], []]),
    ],
)
def test_prompts_may_be_text_or_token_ids(prompt: Any, wanted: Any) -> None:
    assert (
        completion_prompts(read_completion(json.dumps({"prompt": prompt}).encode(), LIMIT))
        == wanted
    )


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1, "a"]], [None], [True, 1], [1.5]])
def test_an_invalid_prompt_is_refused(prompt: Any) -> None:
    body = read_completion(json.dumps({"prompt": prompt}).encode(), LIMIT)
    with pytest.raises(ApiError, match="cannot use field 'prompt'"):
        completion_prompts(body)


def test_fields_become_options_and_unknown_fields_are_refused() -> None:
    body = chat(
        temperature=0.000001, top_k=-1, seed=7, stop="x", max_completion_tokens=5, max_tokens=9,
        logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True},
        logit_bias={"5": -100}, user="u", options={"rejectIfBusy": True},
    )  # fmt: skip
    ask = generation_options(read_chat(body, LIMIT))
    assert ask.params.temperature == 0
    assert (ask.params.top_k, ask.params.seed, ask.params.logprobs) == (0, 7, 3)
    assert ask.params.logit_bias == ((5, -100.0),)
    assert (ask.max_tokens, ask.stops) == (5, ("x",))
    assert ask.stream
    assert ask.include_usage


@pytest.mark.parametrize("read", [read_chat, read_completion])
def test_a_misspelt_field_is_refused_by_name(read: Any) -> None:
    with pytest.raises(
        ApiError, match="cannot use field 'temprature': it is not supported"
    ) as refused:
        read(b'{"temprature": 0}', LIMIT)
    assert refused.value.param == "temprature"


def test_unsupported_fields_pass_with_values_that_change_nothing() -> None:
    read_completely(chat(min_tokens=0, length_penalty=1.0, use_beam_search=False, bad_words=[]))
    read_completely(
        chat(echo=None, functions=[], typical_p=1, add_generation_prompt=True, suffix="")
    )
    with pytest.raises(ApiError, match="'add_generation_prompt': false needs"):
        read_completely(chat(add_generation_prompt=False))


def test_each_field_of_the_sdk_may_be_null() -> None:
    """Some clients send every field, those without a value as null."""
    fields = chat_create_params.CompletionCreateParamsBase.__annotations__.keys()
    read_completely(chat(**dict.fromkeys(fields - {"messages", "model"}), stream=None))
    earlier = {"role": "assistant", "content": "a"}
    nulls = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "name"))
    body = read_chat(chat(messages=[USER, {**earlier, **nulls}, USER]), LIMIT)
    assert template_messages(body) == [USER, earlier, USER]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_chat(chat(messages=[{"role": "developer", "content": parts}]), LIMIT)
    assert template_messages(body) == [{"role": "system", "content": "ab"}]


def test_the_tenant_is_the_salt_whatever_session_the_client_names() -> None:
    sent = {SESSION_AFFINITY: "mine"}
    assert scheduling_params(sent, "tenant", 0.0).tenant == b"tenant"
    assert scheduling_params(sent, "", 0.0).tenant == b"mine"


USER: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (MessageSpec, chat_types.ChatCompletionDeveloperMessageParam),
        (MessageSpec, chat_types.ChatCompletionSystemMessageParam),
        (MessageSpec, chat_types.ChatCompletionUserMessageParam),
        (MessageSpec, chat_types.ChatCompletionAssistantMessageParam),
        (MessageSpec, chat_types.ChatCompletionToolMessageParam),
        (MessageSpec, chat_types.ChatCompletionFunctionMessageParam),
        (PredictionSpec, chat_types.ChatCompletionPredictionContentParam),
        (ToolSpec, chat_types.ChatCompletionFunctionToolParam),
        (FunctionSpec, FunctionDefinition),
        (ToolCallSpec, chat_types.ChatCompletionMessageFunctionToolCallParam),
        (ToolChoiceSpec, chat_types.ChatCompletionNamedToolChoiceParam),
        (ToolChoiceSpec, chat_types.ChatCompletionAllowedToolChoiceParam),
        (AllowedToolsSpec, chat_types.ChatCompletionAllowedToolsParam),
    ],
)
def test_each_field_of_the_sdk_within_a_chat_is_decided(kind: Any, params: Any) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert set(params.__annotations__) - known == set(), "decide these: honoured or refused"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("function_call", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
        ("audio", {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}),
        ("new", {"tools": [{"type": "function", "function": {"name": "f", "new": 1}}]}),
        ("new", {"tools": [{"type": "function", "function": {"name": "f"}, "new": 1}]}),
        ("new", {"response_format": {"type": "json_object", "new": 1}}),
        ("new", {"tool_choice": {"type": "function", "function": {"name": "f"}, "new": 1}}),
    ],
)
def test_a_field_within_a_chat_is_refused_by_name(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=field):
        read_chat(json.dumps({"messages": [USER], **body}).encode(), 10_000)


def test_a_refusal_is_the_text_of_its_message() -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "no", "audio": None}
    body = json.dumps({"messages": [USER, refusal, USER]}).encode()
    assert template_messages(read_chat(body, 10_000))[1] == {"role": "assistant", "content": "no"}
