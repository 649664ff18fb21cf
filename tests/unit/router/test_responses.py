"""Responses are translated to and from chat completions; the official SDK's types accept them."""

import json
from typing import Any, get_args

import msgspec
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseReasoningItem,
    ResponseStreamEvent,
)

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.openai.decode import decode
from router.apis.responses.events import ResponseEvents, new_response
from router.apis.responses.translate import RESPONSES_REQUEST, ResponsesRequest, to_chat
from router.dataplane.sse import DONE_FRAME, data_frame, split_frames

EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def a_request(**fields: Any) -> ResponsesRequest:
    body = {"model": "tiny", "input": "hi", **fields}
    return decode(json.dumps(body).encode(), RESPONSES_REQUEST)


def translated(**fields: Any) -> ResponseEvents:
    request = a_request(**fields)
    return ResponseEvents(request, new_response(request, "resp_1", 7))


def chat(**fields: Any) -> dict[str, Any]:
    chat_body: dict[str, Any] = json.loads(to_chat(a_request(**fields)))
    return chat_body


def test_a_text_becomes_a_user_message() -> None:
    assert chat() == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    chat_body = chat(instructions="be brief", max_output_tokens=9, temperature=0, stream=True)
    assert chat_body["messages"][0] == {"role": "system", "content": "be brief"}
    assert (chat_body["max_tokens"], chat_body["temperature"], chat_body["stream"]) == (9, 0, True)
    assert chat_body["stream_options"] == {"include_usage": True}


CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "About customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds one."},
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
    ],
}


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    call = {"type": "function_call", "call_id": "a", "namespace": "crm", "name": "find"}
    output = {"type": "function_call_output", "call_id": "a", "namespace": "crm", "output": "Ada"}
    body = chat(tools=[TOOL, CRM], input=[{**call, "arguments": "{}"}, output])
    assert [tool["function"] for tool in body["tools"][1:]] == [
        {"name": "crm__find", "description": "About customers.\nFinds one."},
        {
            "name": "crm__f",
            "description": "About customers.",
            "parameters": {"type": "object"},
        },
    ]
    assert body["messages"][0]["tool_calls"][0]["function"]["name"] == "crm__find"

    called = [
        {"index": n, "id": str(n), "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(("crm__f", "f"))
    ]
    complete = {"choices": [{"message": {"tool_calls": called}, "finish_reason": "tool_calls"}]}
    events = translated(tools=[TOOL, CRM])
    answer = json.loads(events.translate_body(json.dumps(complete).encode()))
    response = Response.model_validate(answer, strict=True)
    first, second = response.output
    assert isinstance(first, ResponseFunctionToolCall)
    assert isinstance(second, ResponseFunctionToolCall)
    assert [(one.namespace, one.name) for one in (first, second)] == [("crm", "f"), (None, "f")]
    assert answer["tools"][1]["name"] == "crm"


def test_a_function_of_a_namespace_in_a_background_response_is_called_by_both_names() -> None:
    """What was stored of the response before its answer is read from JSON."""
    request = a_request(tools=[CRM], background=True)
    stored = json.loads(msgspec.json.encode(new_response(request, "resp_1", 7, is_stored=True)))
    call = {"index": 0, "id": "a", "function": {"name": "crm__find", "arguments": "{}"}}
    body = json.dumps({"choices": [{"message": {"tool_calls": [call]}}]}).encode()
    answer = json.loads(ResponseEvents(request, stored).translate_body(body))
    assert (answer["output"][0]["namespace"], answer["output"][0]["name"]) == ("crm", "find")


def test_what_describes_the_client_changes_nothing() -> None:
    about = {"client_metadata": {"installation": "x"}, "metadata": {"a": "b"}, "user": "u"}
    assert chat(**about) == chat()


def test_input_items_become_messages_tool_calls_and_tool_outputs() -> None:
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "rain"}, {"type": "t", "text": "?"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "let me see", "annotations": [], "parsed": {}}
            ],
        },
        {
            "type": "function_call",
            "call_id": "a",
            "name": "f",
            "arguments": "{}",
            "parsed_arguments": {},
        },
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "rain"}],
        },
    ]
    function = {"name": "f", "arguments": "{}"}
    assert chat(input=given)["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "rain?",
            "reasoning": "rain?",
            "tool_calls": [
                {"id": "a", "type": "function", "function": function},
                {"id": "b", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
    ]


def test_instructions_are_one_system_message_at_the_beginning() -> None:
    """Codex sends its instructions in two developer messages, and later ones when they change.

    Most templates leave a developer message out, and that of Qwen3.5 raises an error for a second
    system message.
    """
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "developer", "content": [{"type": "input_text", "text": "or not"}]},
        {"role": "user", "content": "folder: /tmp"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "developer", "content": "be polite"},
    ]
    assert chat(instructions="be kind", input=given)["messages"] == [
        {"role": "system", "content": "be kind\nbe brief\nor not"},
        {"role": "user", "content": "folder: /tmp\nhi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "be polite"},
    ]


def test_reasoning_belongs_to_the_answer_after_it() -> None:
    """Without it a model that reasons would begin anew after each result of a tool."""

    def thought(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{text}", "summary": [], "content": content}

    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "sun"}
    text = {"role": "assistant", "content": "let me see"}
    user = {"role": "user", "content": "and?"}
    given = [thought("a"), text, thought("b"), call, output, thought("c"), user, text]
    first, _, _, last = chat(input=given)["messages"]
    assert (first["content"], len(first["tool_calls"])) == ("let me see", 1)
    assert (first["reasoning_content"], first["reasoning"]) == ("ab", "ab")
    assert last == text
    (alone,) = chat(input=[thought("a"), call])["messages"]
    assert (alone["content"], alone["reasoning"]) == (None, "a")


def test_reasoning_comes_back_as_its_encrypted_content() -> None:
    """Codex and the AI SDK send back no other part of it."""
    message = {"reasoning": "h\u00fcm", "content": "a"}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    include = ["reasoning.encrypted_content"]
    answer = json.loads(translated(include=include).translate_body(body))
    first, _ = Response.model_validate(answer, strict=True).output
    assert isinstance(first, ResponseReasoningItem)
    encoded: dict[str, Any] = {"type": "reasoning", "id": first.id, "summary": []}
    encoded["encrypted_content"] = first.encrypted_content
    (back,) = chat(input=[encoded, answer["output"][1]])["messages"]
    assert (back["content"], back["reasoning_content"]) == ("a", "h\u00fcm")
    assert "encrypted_content" not in answer["output"][1]
    for others in ("gAAAAABo", "encoded:\u00fc", "encoded:/w==", 3, None):
        (back,) = chat(input=[{**encoded, "encrypted_content": others}, answer["output"][1]])[
            "messages"
        ]
        assert back == {"role": "assistant", "content": "a"}
    plain = json.loads(translated().translate_body(body))
    assert "encrypted_content" not in plain["output"][0]


def test_images_of_tools_follow_their_results() -> None:
    url = "data:image/png;base64,AAAA"
    image = {"type": "input_image", "image_url": url}
    outputs = [
        {"type": "function_call_output", "call_id": "a", "output": [image]},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "see"}, image],
        },
    ]
    part = {"type": "image_url", "image_url": {"url": url}}
    results = [
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "tool", "tool_call_id": "b", "content": "see"},
        {"role": "user", "content": [part, part]},
    ]
    assert chat(input=outputs)["messages"] == results
    question = {"role": "user", "content": "what?"}
    asked = {"role": "user", "content": [part, part, {"type": "text", "text": "what?"}]}
    assert chat(input=[*outputs, question])["messages"] == [*results[:2], asked]


def test_images_become_parts() -> None:
    url = "data:image/png;base64,AAAA"
    content = [
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": url, "detail": "low"},
    ]
    given = [{"role": "user", "content": content}]
    assert chat(input=given, prompt_cache_key="k", service_tier="flex") == {
        "model": "tiny",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what?"},
                    {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                ],
            }
        ],
        "prompt_cache_key": "k",
        "service_tier": "flex",
    }


@pytest.mark.parametrize(
    "part", [{"file_id": "f"}, {"image_url": "http://example.com/a.png"}, {"image_url": None}]
)
def test_an_image_elsewhere_is_refused(part: Any) -> None:
    with pytest.raises(ApiError, match="cannot use field 'input"):
        chat(input=[{"role": "user", "content": [{"type": "input_image", **part}]}])


def test_tools_formats_and_effort_are_translated() -> None:
    schema = {"type": "object"}
    chat_body = chat(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        options={"rejectIfBusy": True},
    )
    assert chat_body["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    ]
    assert chat_body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    named = {"name": "x", "schema": schema, "strict": True}
    assert chat_body["response_format"] == {"type": "json_schema", "json_schema": named}
    assert (chat_body["reasoning_effort"], chat_body["options"]) == ("low", {"rejectIfBusy": True})


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "auto", "tools": []}, None),
        ({"tool_choice": "auto", "tools": [TOOL]}, "auto"),
        ({"tool_choice": "none"}, "none"),
        ({"tool_choice": "required"}, "required"),
    ],
)
def test_the_default_choice_of_no_tools_is_left_out(fields: Any, sent: str | None) -> None:
    """vLLM refuses it without tools."""
    assert chat(**fields).get("tool_choice") == sent


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"previous_response_id": "../etc"}, "previous_response_id"),
        ({"conversation": {"id": ""}}, "conversation.id"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search", "external_web_access": False}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [CRM, CRM]}, "tools"),
        ({"tools": [CRM, {**TOOL, "name": "crm__f"}]}, "tools"),
        ({"tools": [{**CRM, "name": "n" * 63}]}, "tools"),
        (
            {"tools": [{**CRM, "tools": [{"type": "custom", "name": "c"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"input": [{"role": "user", "content": "x", "namespace": "crm"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input[0].summary[0]"),
    ],
)
def test_an_unsupported_request_is_refused_with_its_field(fields: Any, param: str) -> None:
    with pytest.raises(ApiError, match=r"^cannot ") as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_complete_answer_becomes_a_response(name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {name: "hm", "content": "hello", "tool_calls": [call]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
    events = translated(tools=[TOOL])
    response = Response.model_validate(json.loads(events.translate_body(body)), strict=True)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.status, response.output_text) == ("completed", "hello")
    assert response.usage is not None
    assert response.usage.input_tokens == 5
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.total_tokens == 8


def test_an_answer_that_reached_its_token_limit_is_incomplete() -> None:
    choice = {"message": {"content": "hel"}, "finish_reason": "length"}
    body = json.loads(translated().translate_body(json.dumps({"choices": [choice]}).encode()))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


def test_a_stream_of_reasoning_text_and_tool_calls() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "hel"},
        {"content": "lo"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 0}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    frames = [data_frame({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    frames += [data_frame(last), data_frame({"choices": [], "usage": USAGE}), DONE_FRAME]
    events = _events(translated(tools=[TOOL], stream=True), frames)

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 4
    assert kinds[-1] == "completed"
    response = events[-1]["response"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == items
    assert [item["type"] for item in items] == ["reasoning", "message"] + 2 * ["function_call"]
    assert items[1]["content"][0]["text"] == "hello"
    assert [(item["call_id"], item["name"], item["arguments"]) for item in items[2:]] == [
        ("a", "f", '{"a":1}'),
        ("b", "g", "{}"),
    ]
    assert response["usage"]["output_tokens"] == 3
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in items]


SUMMARY = {"type": "summary_text", "text": "hm, hm"}


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
@pytest.mark.parametrize("value", ["auto", "detailed"])
def test_reasoning_is_its_own_summary(field: str, value: str) -> None:
    """Most clients show no other part of it. It is returned once."""
    include = ["reasoning.encrypted_content"]
    deltas: list[dict[str, Any]] = [
        *({"reasoning_content": "hm, "}, {"reasoning_content": "hm"}),
        {"content": "hello"},
    ]
    frames = [data_frame({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    asked = translated(stream=True, reasoning={field: value}, include=include)
    events = _events(asked, [*frames, DONE_FRAME])
    reasoning = [event for event in events if event.get("output_index") == 0]
    assert [event["type"].removeprefix("response.") for event in reasoning] == [
        "output_item.added",
        "reasoning_summary_part.added",
        *["reasoning_summary_text.delta"] * 2,
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert {event["summary_index"] for event in reasoning[1:-1]} == {0}
    item = reasoning[-1]["item"]
    assert item["summary"] == [SUMMARY]
    assert "content" not in item

    body = {"choices": [{"message": {"reasoning": "hm, hm", "content": "hello"}}]}
    whole = translated(reasoning={field: value}, include=include)
    answer = json.loads(whole.translate_body(json.dumps(body).encode()))
    assert Response.model_validate(answer, strict=True).output_text == "hello"
    assert answer["output"][0] == item
    for left_out in ("", "encrypted_content"):
        back = {name: part for name, part in item.items() if name != left_out}
        (message,) = chat(input=[back, answer["output"][1]])["messages"]
        assert message["reasoning_content"] == "hm, hm"


def test_only_the_last_item_of_an_incomplete_answer_is_incomplete() -> None:
    deltas: list[dict[str, Any]] = [{"reasoning_content": "hm"}, {"content": "hel"}]
    frames = [data_frame({"choices": [{"delta": delta}]}) for delta in deltas]
    frames += [data_frame({"choices": [{"finish_reason": "length"}]}), DONE_FRAME]
    events = _events(translated(stream=True), frames)
    assert events[-1]["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["status"] for item in done] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    "data",
    ["[1]", "nonsense", '{"choices":3}', '{"choices":[{"delta":{"tool_calls":[{"index":"x"}]}}]}'],
)
def test_a_frame_that_is_not_a_chunk_is_dropped(data: str) -> None:
    events = translated(stream=True)
    events.translate_frame(data_frame({"choices": []}))
    assert events.translate_frame(f"data: {data}\n\n".encode()) == b""
    with pytest.raises(ApiError, match=r"^cannot answer"):
        events.translate_body(data.encode())


def test_a_broken_stream_ends_with_a_failure_that_holds_the_output_so_far() -> None:
    events = translated(stream=True)
    sent = _events(events, [data_frame({"choices": [{"delta": {"content": "hel"}}]})])
    failed = events.failed(ApiError(ErrorCode.UPSTREAM, "cannot continue"))
    # Frames that are events and comments stay unchanged.
    assert events.translate_frame(failed) == failed
    assert events.translate_frame(b": continued\n\n") == b": continued\n\n"
    last = _read(failed)
    assert last["sequence_number"] == sent[-1]["sequence_number"] + 1
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"] == "cannot continue"
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "hel")


def _events(events: ResponseEvents, frames: list[bytes]) -> list[dict[str, Any]]:
    sent = b"".join(events.translate_frame(frame) for frame in frames)
    return [_read(event) for event in split_frames(sent)]


def _read(event: bytes) -> dict[str, Any]:
    """Return the body of one event, which the official SDK must accept."""
    name, data = event.decode().rstrip("\n").split("\n")
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    EVENTS[body["type"]].model_validate(body, strict=True)
    return body


def test_parallel_calls_of_a_complete_answer_are_items_of_their_own() -> None:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": f'{{"n":{n}}}'}}
        for n in range(3)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    answer = translated().translate_body(json.dumps(body).encode())
    items = [item.to_dict() for item in Response.model_validate_json(answer).output]
    assert [item["call_id"] for item in items] == ["c0", "c1", "c2"]
    assert [json.loads(str(item["arguments"])) for item in items] == [{"n": n} for n in range(3)]


def test_a_user_that_was_not_sent_is_left_out() -> None:
    assert "user" not in new_response(a_request(), "resp_1", 7)
    assert new_response(a_request(user="u"), "resp_1", 7)["user"] == "u"
