"""Messages are translated to and from chat completions; the official SDK's types accept them."""

import json
import re
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from anthropic.types import (
    Message,
    ModelInfo,
    RawMessageStreamEvent,
    ToolReferenceBlockParam,
    Usage,
    content_block_param,
    message_count_tokens_params,
    message_create_params,
    tool_param,
    tool_result_block_param,
)
from anthropic.types.beta import BetaToolParam
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_tool_union_param import BetaToolUnionParam
from anthropic.types.user_message_param import UserMessageParam

from isochrone.wire.errors import ApiError, ErrorCode, context_length_message, openai_error
from isochrone.wire.ids import DeploymentId, ModelId
from isochrone.wire.models.model import Deprecation
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis import chat_messages
from router.apis.messages import schema
from router.apis.messages.errors import error_body, error_status, translate_refusal
from router.apis.messages.events import MessageEvents, signature_of, translate_usage
from router.apis.messages.models import model_info
from router.apis.messages.schema import COUNT_TOKENS_REQUEST, MESSAGES_REQUEST
from router.apis.messages.translate import to_chat, to_tokenize
from router.apis.openai.decode import CHAT, decode, resume_body_builder
from router.dataplane.sse import DONE_FRAME, data_frame, split_frames

EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(RawMessageStreamEvent)[0])
}
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}

REFUSED: dict[str, Any] = {
    "container": "c",
    "diagnostics": {},
    "inference_geo": "eu",
    "speed": "fast",
    "user_profile_id": "u",
    "workspace_id": "w",
    "service_tier": "priority",
    "max_tokens": 0,
    "thinking": {"type": "between_tools"},
    "cache_control": {"type": "ephemeral", "ttl": "1d"},
    "mcp_servers": [{"name": "m"}],
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "unheard_of": 1,
}
REFUSED_BLOCKS: dict[str, dict[str, Any]] = {
    "redacted_thinking": {"type": "redacted_thinking", "data": "x"},
    "search_result": {"type": "search_result", "source": "s", "title": "t", "content": []},
    "server_tool_use": {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
    "image of a file": {"type": "image", "source": {"type": "file", "file_id": "f"}},
    "image elsewhere": {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/a"}},
    "PDF": {"type": "document", "source": {"type": "base64", "data": "", "media_type": "a/pdf"}},
    "citations": {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
        "citations": {"enabled": True},
    },
}
REFUSED_TOOLS: dict[str, dict[str, Any]] = {
    "web search": {"type": "web_search_20250305", "name": "web_search"},
    "bash": {"type": "bash_20250124", "name": "bash"},
    "allowed_callers": {**TOOL, "allowed_callers": ["code_execution_20250825"]},
}


def chat(**fields: Any) -> dict[str, Any]:
    given = decode(json.dumps({**BODY, **fields}).encode(), MESSAGES_REQUEST)
    chat_body: dict[str, Any] = json.loads(to_chat(given))
    # The router itself accepts what it translates to.
    decode(to_chat(given), CHAT)
    return chat_body


def messages(*given: Any, **fields: Any) -> list[dict[str, Any]]:
    translated: list[dict[str, Any]] = chat(messages=list(given), **fields)["messages"]
    return translated


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def frame(delta: dict[str, Any], **choice: Any) -> bytes:
    return data_frame({"choices": [{"index": 0, "delta": delta, **choice}]})


def events_of(*frames: bytes, **settings: Any) -> list[dict[str, Any]]:
    """Return the events for frames; each is checked against the SDK's type."""
    translator = MessageEvents("msg_1", "tiny", **settings)
    translated = b"".join(translator.translate_frame(each) for each in frames)
    events = []
    for event in split_frames(translated):
        name, data = event.decode().removeprefix("event: ").split("\ndata: ")
        body = json.loads(data)
        assert body["type"] == name
        if name not in ("ping", "error"):
            EVENTS[name].model_validate(body, strict=True)
        events.append(body)
    return events


def message_of(message: dict[str, Any], **choice: Any) -> dict[str, Any]:
    completion = {"choices": [{"index": 0, "message": message, **choice}], "usage": USAGE}
    body: dict[str, Any] = json.loads(
        MessageEvents("msg_1", "tiny").translate_body(json.dumps(completion).encode())
    )
    Message.model_validate(body)
    return body


def test_each_field_of_the_sdk_is_decided() -> None:
    create = message_create_params.MessageCreateParamsStreaming.__annotations__.keys()
    base = message_create_params.MessageCreateParamsBase.__annotations__.keys()
    assert {*create, *base} <= {*schema.MessagesRequest.__struct_fields__}
    count = message_count_tokens_params.MessageCountTokensParams.__annotations__.keys()
    assert {*count} <= {*schema.CountTokensRequest.__struct_fields__}
    assert {*tool_param.ToolParam.__annotations__} <= {*schema.CustomTool.__struct_fields__}
    assert {*UserMessageParam.__annotations__} <= {*schema.InputMessage.__struct_fields__}
    blocks = {kind.__name__ for kind in get_args(content_block_param.ContentBlockParam)}
    accepted = {"Text", "Image", "Document", "Thinking", "ToolUse", "ToolResult"}
    assert blocks - {f"{name}BlockParam" for name in accepted} == {
        *("SearchResultBlockParam", "RedactedThinkingBlockParam", "ServerToolUseBlockParam"),
        *("WebSearchToolResultBlockParam", "WebFetchToolResultBlockParam"),
        *("CodeExecutionToolResultBlockParam", "BashCodeExecutionToolResultBlockParam"),
        *("TextEditorCodeExecutionToolResultBlockParam", "ToolSearchToolResultBlockParam"),
        *("ContainerUploadBlockParam",),
    }
    for kind in get_args(content_block_param.ContentBlockParam):
        name = kind.__name__.removesuffix("Param")
        if hasattr(schema, name):
            fields = {*getattr(schema, name).__struct_fields__, "type"}
            assert {*kind.__annotations__} <= fields, name
    results = {kind.__name__ for kind in get_args(tool_result_block_param.Content)}
    accepted = {"Text", "Image", "Document", "ToolReference"}
    assert results - {f"{name}BlockParam" for name in accepted} == {
        *("SearchResultBlockParam", "BrowserStateBlockParam")
    }
    reference = {*schema.ToolReferenceBlock.__struct_fields__, "type"}
    assert {*ToolReferenceBlockParam.__annotations__} <= reference


def test_each_block_and_tool_of_the_beta_sdk_is_decided() -> None:
    """What only the beta has is refused by name: its `type` or its field is unknown here."""
    accepted = {"Text", "Image", "RequestDocument", "Thinking", "ToolUse", "ToolResult"}
    blocks = [kind for kind in get_args(BetaContentBlockParam) if isinstance(kind, type)]
    assert {f"Beta{name}BlockParam" for name in accepted} <= {kind.__name__ for kind in blocks}
    refused = 0
    for kind in blocks:
        name = kind.__name__.removeprefix("Beta").removesuffix("Param").replace("Request", "")
        if hasattr(schema, name):
            fields = {*getattr(schema, name).__struct_fields__, "type"}
            assert {*kind.__annotations__} <= fields, name
            continue
        (tag,) = get_args(get_type_hints(kind)["type"])
        assert_refused(
            "messages[0].content", messages=[{"role": "user", "content": [{"type": tag}]}]
        )
        refused += 1
    assert refused == len(blocks) - len(accepted)
    for kind in get_args(BetaToolUnionParam):
        if kind is BetaToolParam:
            assert {*kind.__annotations__} <= {*schema.CustomTool.__struct_fields__}
            continue
        for tag in get_args(get_type_hints(kind)["type"]):
            tool = {"type": tag, "name": "f", "input_schema": SCHEMA}
            assert_refused("tools[0]", tools=[tool])


def assert_refused(field: str, **fields: Any) -> None:
    """Check that a request with `fields` is refused with an error that names the field."""
    with pytest.raises(ApiError) as caught:
        decode(json.dumps({**BODY, **fields}).encode(), schema.MESSAGES_REQUEST)
    assert field in str(caught.value)


def test_a_text_becomes_a_user_message() -> None:
    assert chat() == {"model": "tiny", "max_tokens": 9, "messages": BODY["messages"]}
    full = chat(
        system="be brief",
        stop_sequences=["x"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stream=True,
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert full == {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "be brief"}, *BODY["messages"]],
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
    }


def test_blocks_are_joined_and_a_changing_billing_line_is_no_part_of_the_prompt() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [text("x-anthropic-billing-header: a=1;"), text("be brief", **cached), text("or not")]
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    assert messages(user(text("a"), document, text("b")), system=system) == [
        {"role": "system", "content": "be brief\nor not"},
        {"role": "user", "content": "a\nT\nD\nb"},
    ]


def test_consecutive_messages_of_a_role_are_one() -> None:
    assert messages({"role": "user", "content": "a"}, user(IMAGE), user(text("b"))) == [
        {"role": "user", "content": [text("a"), IMAGE_PART, text("b")]}
    ]


def test_a_later_system_message_is_the_users() -> None:
    """Claude Code sends one after the first question, for which many templates have no place."""
    first = [{"role": "user", "content": "a"}, {"role": "system", "content": "agents: none"}]
    system = {"role": "system", "content": "be brief"}
    begun = messages(*first, system="be brief")
    assert begun == [system, {"role": "user", "content": "a\nagents: none"}]
    answer, later = {"role": "assistant", "content": "b"}, {"role": "system", "content": "c"}
    assert messages(*first, answer, later, system="be brief") == [
        *begun,
        answer,
        {"role": "user", "content": "c"},
    ]
    assert messages({"role": "system", "content": "d"}, *first[:1], system="be brief") == [
        {"role": "system", "content": "be brief\nd"},
        first[0],
    ]


def test_texts_before_the_first_image_are_one_part() -> None:
    """So a prompt stays the beginning of the next one, to which an image is added."""
    a_b = [{"role": "user", "content": "a"}, user(text("b"))]
    assert messages(*a_b) == [{"role": "user", "content": "a\nb"}]
    assert messages(*a_b, user(text("c"), IMAGE), user(text("d"))) == [
        {"role": "user", "content": [text("a\nb"), text("c"), IMAGE_PART, text("d")]}
    ]


def test_each_text_of_many_messages_of_a_role_is_joined_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All were joined again for each message: 8 MB of them stopped the router for seconds."""
    joined = 0

    class CountingSeparator(str):
        __slots__ = ()

        def join(self, texts: Iterable[str], /) -> str:
            nonlocal joined
            text = super().join(texts)
            joined += len(text)
            return text

    monkeypatch.setattr(chat_messages, "BETWEEN_TEXTS", CountingSeparator("\n"))
    for role in ("user", "assistant"):
        joined = 0
        (combined,) = messages(*[{"role": role, "content": 9 * "x"}] * 1000)
        assert len(combined["content"]) == 1000 * 10 - 1
        assert joined < 4 * len(combined["content"])


def test_calls_and_results_of_tools_become_messages_of_their_own() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": name, "name": "f", "input": {"city": "Paris"}}

    def result(name: str, content: Any, **fields: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": name, "content": content, **fields}

    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    given = [
        user(text("weather?")),
        {"role": "assistant", "content": [thinking, text("let me see"), call("a"), call("b")]},
        user(result("a", "sun"), result("b", [text("rain"), IMAGE], is_error=True), text("and?")),
    ]
    function = {"name": "f", "arguments": '{"city":"Paris"}'}
    assert messages(*given) == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": function},
                {"id": "b", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: rain"},
        {"role": "user", "content": [IMAGE_PART, text("and?")]},
    ]


def test_tools_and_the_choice_of_one() -> None:
    tool = {**TOOL, "strict": True, "input_examples": [{"city": "Rome"}]}
    function = {
        "name": "f",
        "description": "d",
        "parameters": {**SCHEMA, "examples": [{"city": "Rome"}]},
        "strict": True,
    }
    assert chat(tools=[tool])["tools"] == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "f"}}
    for choice, expected in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, named),
    ):
        assert chat(tools=[TOOL], tool_choice=choice)["tool_choice"] == expected
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert chat(tools=[TOOL], tool_choice=single)["parallel_tool_calls"] is False
    with pytest.raises(ApiError, match="'tool_choice': it needs 'tools'"):
        chat(tool_choice={"type": "any"})


def test_thinking_is_turned_on_and_off_through_the_chat_template() -> None:
    on = {"type": "enabled", "budget_tokens": 1024}
    assert chat(thinking=on, max_tokens=2000)["chat_template_kwargs"] == {"enable_thinking": True}
    off = chat(thinking={"type": "disabled"})
    assert off["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(ApiError, match="must be less than 'max_tokens'") as refused:
        chat(thinking=on)
    assert refused.value.param == "thinking.budget_tokens"


def test_an_answer_that_the_client_began_is_continued_also_by_another_replica() -> None:
    given = [*BODY["messages"], {"role": "assistant", "content": "One, "}]
    body = chat(messages=given, stream=True)
    assert body["continue_final_message"] is True
    encoded = json.dumps(body).encode()
    build = resume_body_builder(decode(encoded, CHAT))
    assert build is not None
    resumed = json.loads(build(encoded, "two, ", 2) or b"")
    assert resumed["messages"] == [
        *BODY["messages"],
        {"role": "assistant", "content": "One, two, "},
    ]
    assert (resumed["max_tokens"], resumed["continue_final_message"]) == (7, True)


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_name(field: str) -> None:
    with pytest.raises(ApiError, match=f"cannot use field '{field}") as refused:
        chat(**{field: REFUSED[field]})
    assert (refused.value.param or "").startswith(field)


@pytest.mark.parametrize("kind", REFUSED_BLOCKS)
def test_a_block_that_is_not_honoured_is_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="cannot use field 'messages"):
        messages(user(REFUSED_BLOCKS[kind]))


@pytest.mark.parametrize("kind", REFUSED_TOOLS)
def test_a_tool_that_is_not_honoured_is_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="cannot use field 'tools"):
        chat(tools=[REFUSED_TOOLS[kind]])


def test_a_block_in_a_message_of_another_role_is_refused() -> None:
    with pytest.raises(ApiError, match="role 'user' must not have a block of type 'thinking'"):
        messages(user({"type": "thinking", "thinking": "a", "signature": "b"}))
    with pytest.raises(ApiError, match="no message has any content"):
        messages(user())


def test_the_chat_whose_tokens_are_counted_is_the_same() -> None:
    fields = {name: value for name, value in BODY.items() if name != "max_tokens"}
    body = json.dumps({**fields, "tools": [TOOL], "system": "be brief"}).encode()
    counted = json.loads(to_tokenize(decode(body, COUNT_TOKENS_REQUEST)))
    full = chat(tools=[TOOL], system="be brief")
    del full["max_tokens"]
    assert counted == full


def test_a_complete_message() -> None:
    body = message_of({"role": "assistant", "content": "hello"}, finish_reason="stop")
    assert body == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
            "service_tier": "standard",
        },
    }


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 128001}, "end_turn", None),
        ({"finish_reason": "stop", "matched_stop": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "matched_stop": 128001}, "end_turn", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
    ],
)
def test_the_stop_reason(choice: dict[str, Any], reason: str, sequence: str | None) -> None:
    body = message_of({"role": "assistant", "content": "a"}, **choice)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(("reasoning", "thinking"), [(2, 2), (0, 0), (9, 3)])
def test_the_tokens_of_thinking_are_those_that_the_engine_counts(
    reasoning: int, thinking: int
) -> None:
    as_in_sglang = {"reasoning_tokens": reasoning, "completion_tokens_details": None}
    for counts in ({"completion_tokens_details": {"reasoning_tokens": reasoning}}, as_in_sglang):
        usage = Usage.model_validate(translate_usage({**USAGE, **counts}), strict=True)
        assert usage.output_tokens_details is not None
        assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (3, thinking)


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_parallel_calls_without_streaming(finish: str) -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"id": "c", "type": "function", "function": {"name": "h", "arguments": '{"cut'}},
    ]
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": calls}
    body = message_of(message, finish_reason=finish)
    assert body["stop_reason"] == "tool_use"
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": signature_of("hm")},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        {"type": "tool_use", "id": "c", "name": "h", "input": {"unparsed": '{"cut'}},
    ]


@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning"])
def test_a_stream_of_reasoning_text_and_calls(reasoning: str) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        head = {"id": f"id{index}"} if "name" in function else {}
        return {"tool_calls": [{"index": index, "function": function, **head}]}

    events = events_of(
        frame({"role": "assistant", "content": ""}),
        frame({reasoning: "hm"}),
        frame({"content": "he"}),
        frame({"content": "llo"}),
        frame(call(0, name="f")),
        frame(call(0, arguments='{"city":')),
        frame(call(0, arguments='"Rome"}')),
        frame(call(1, name="g", arguments="{}")),
        frame({}, finish_reason="tool_calls"),
        data_frame({"choices": [], "usage": USAGE}),
        DONE_FRAME,
    )
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [starts[2]["id"], starts[3]["id"]] == ["id0", "id1"]
    deltas = [
        (event["index"], event["delta"])
        for event in events
        if event["type"] == "content_block_delta"
    ]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "hm"}),
        (0, {"type": "signature_delta", "signature": signature_of("hm")}),
        (1, {"type": "text_delta", "text": "he"}),
        (1, {"type": "text_delta", "text": "llo"}),
        (2, {"type": "input_json_delta", "partial_json": '{"city":'}),
        (2, {"type": "input_json_delta", "partial_json": '"Rome"}'}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["cache_read_input_tokens"] == 4


def test_reasoning_is_left_out_on_request() -> None:
    events = events_of(
        frame({"reasoning_content": "hm"}), frame({"content": "a"}), omits_thinking=True
    )
    assert "hm" not in json.dumps(events)
    assert [event.get("delta", {}).get("type") for event in events[3:5]] == [
        "signature_delta",
        None,
    ]


def test_an_answer_whose_calls_are_not_utf_8_is_none() -> None:
    body = b'{"choices": [{"message": {"tool_calls": [{"id": "\xff"}]}}]}'
    with pytest.raises(ApiError, match="did not return a chat completion"):
        MessageEvents("msg_1", "tiny").translate_body(body)


def test_comments_and_errors_within_a_stream_stay_as_they_are() -> None:
    translator = MessageEvents("msg_1", "tiny")
    assert translator.translate_frame(b": resumed\n\n") == b": resumed\n\n"
    error = translator.failed(ApiError(ErrorCode.UPSTREAM, "cannot continue"))
    assert translator.translate_frame(error) == error
    assert json.loads(error.split(b"data: ")[1]) == {
        "type": "error",
        "error": {"type": "api_error", "message": "cannot continue"},
        "request_id": None,
    }


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.INVALID_REQUEST, 400, "invalid_request_error"),
        (ErrorCode.INVALID_KEY, 401, "authentication_error"),
        (ErrorCode.MODEL_NOT_FOUND, 404, "not_found_error"),
        (ErrorCode.TOO_LARGE, 413, "request_too_large"),
        (ErrorCode.RATE_LIMITED, 429, "rate_limit_error"),
        (ErrorCode.QUOTA_EXCEEDED, 429, "rate_limit_error"),
        (ErrorCode.OUT_OF_CAPACITY, 529, "overloaded_error"),
        (ErrorCode.UNAVAILABLE, 503, "api_error"),
        (ErrorCode.METHOD_NOT_ALLOWED, 405, "invalid_request_error"),
    ],
)
def test_errors(code: ErrorCode, status: int, kind: str) -> None:
    error = ApiError(code, "m")
    assert error_status(error) == status
    body = error_body(error, "r")
    assert body["error"]["type"] == kind
    # A replica's refusal has OpenAI's format, and the same code.
    assert json.loads(translate_refusal(msgspec.json.encode(openai_error(error)), "r")) == body


@pytest.mark.parametrize(
    ("deprecation", "lifecycle", "retires_at"),
    [
        (None, "active", None),
        (Deprecation(announced_at=5), "deprecated", None),
        (Deprecation(announced_at=5, sunset_at=20), "deprecated", "1970-01-01T00:00:20Z"),
        (Deprecation(announced_at=5, sunset_at=9), "retired", "1970-01-01T00:00:09Z"),
    ],
)
def test_a_model_says_when_it_ends(
    deprecation: Deprecation | None, lifecycle: str, retires_at: str | None
) -> None:
    entry = DeploymentEntry(
        deployment_id=DeploymentId("d"),
        name="tiny",
        model_id=ModelId("m"),
        context_tokens=512,
        deprecation=deprecation,
    )
    body = model_info(entry, 10.0)
    ModelInfo.model_validate(body)
    assert (body["lifecycle"], body["retires_at"]) == (lifecycle, retires_at)


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (context_length_message(4096, "your messages resulted in 5000 tokens"), (5000, 4096)),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains at"
            " least 5000 input tokens, which exceeds this limit even without any output tokens.",
            (5000, 4096),
        ),
        ("This model's maximum context length is 9 tokens. However, 99 characters", None),
        ("the request exceeds the available context size", None),
    ],
)
def test_a_prompt_that_is_too_long_is_named_as_anthropic_does(
    said: str, counts: tuple[int, int] | None
) -> None:
    """Claude Code looks for these words, and for the numbers after them."""
    refused = openai_error(ApiError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, said))
    answer = json.loads(translate_refusal(json.dumps(refused).encode(), "req"))
    message = answer["error"]["message"]
    assert message.startswith("prompt is too long: ")
    assert message.endswith(said)
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
    assert (found and (int(found[1]), int(found[2]))) == counts
