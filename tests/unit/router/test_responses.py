"""The Responses API and chat completions say the same; the official SDK's types read all of it."""

import json
from typing import Any, get_args

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.openai.decode import decode
from router.apis.responses.events import ResponseEvents, new_response
from router.apis.responses.translate import RESPONSES_REQUEST, to_chat
from router.dataplane.sse import DONE_FRAME, data_frame, split_frames

EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def a_response(**fields: Any) -> dict[str, Any]:
    wish = decode(
        json.dumps({"model": "tiny", "input": "hi", **fields}).encode(), RESPONSES_REQUEST
    )
    return new_response(wish, "resp_1", 7)


def chat(**fields: Any) -> dict[str, Any]:
    wish = decode(
        json.dumps({"model": "tiny", "input": "hi", **fields}).encode(), RESPONSES_REQUEST
    )
    asked: dict[str, Any] = json.loads(to_chat(wish))
    return asked


def test_a_text_is_a_message() -> None:
    assert chat() == {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    asked = chat(instructions="be brief", max_output_tokens=9, temperature=0, stream=True)
    assert asked["messages"][0] == {"role": "system", "content": "be brief"}
    assert (asked["max_tokens"], asked["temperature"], asked["stream"]) == (9, 0, True)
    assert asked["stream_options"] == {"include_usage": True}


def test_items_are_messages_calls_and_what_they_gave() -> None:
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
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
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [
                {"id": "a", "type": "function", "function": function},
                {"id": "b", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
    ]


def test_tools_formats_and_effort_are_passed_on() -> None:
    schema = {"type": "object"}
    asked = chat(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "low"},
        options={"rejectIfBusy": True},
    )
    assert asked["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    ]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    named = {"name": "x", "schema": schema, "strict": True}
    assert asked["response_format"] == {"type": "json_schema", "json_schema": named}
    assert (asked["reasoning_effort"], asked["options"]) == ("low", {"rejectIfBusy": True})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(fields: Any, param: str) -> None:
    with pytest.raises(ApiError, match=r"^cannot ") as refused:
        chat(**fields)
    assert refused.value.param == param


def test_a_whole_answer() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    said = {"reasoning_content": "hm", "content": "hello", "tool_calls": [call]}
    choice = {"message": said, "finish_reason": "tool_calls"}
    body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
    told = json.loads(ResponseEvents(a_response(tools=[TOOL])).translate_body(body))
    read = Response.model_validate(told, strict=True)
    assert [item.type for item in read.output] == ["reasoning", "message", "function_call"]
    assert (read.status, read.output_text) == ("completed", "hello")
    assert read.usage is not None
    assert (read.usage.input_tokens, read.usage.input_tokens_details.cached_tokens) == (5, 4)
    assert read.usage.total_tokens == 8


def test_an_answer_cut_short_is_incomplete() -> None:
    choice = {"message": {"content": "hel"}, "finish_reason": "length"}
    told = json.loads(
        ResponseEvents(a_response()).translate_body(json.dumps({"choices": [choice]}).encode())
    )
    assert told["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["output"][0]["status"] == "incomplete"


def test_a_stream_of_thought_text_and_calls() -> None:
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
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    frames += [data_frame(ended), data_frame({"choices": [], "usage": USAGE}), DONE_FRAME]
    events = _events(ResponseEvents(a_response(tools=[TOOL], stream=True)), frames)

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
    assert [(one["call_id"], one["name"], one["arguments"]) for one in items[2:]] == [
        ("a", "f", '{"a":1}'),
        ("b", "g", "{}"),
    ]
    assert response["usage"]["output_tokens"] == 3
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in items]


def test_of_an_answer_cut_short_only_the_last_item_is_incomplete() -> None:
    deltas: list[dict[str, Any]] = [{"reasoning_content": "hm"}, {"content": "hel"}]
    frames = [data_frame({"choices": [{"delta": delta}]}) for delta in deltas]
    frames += [data_frame({"choices": [{"finish_reason": "length"}]}), DONE_FRAME]
    events = _events(ResponseEvents(a_response(stream=True)), frames)
    assert events[-1]["type"] == "response.incomplete"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["status"] for item in done] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    "data",
    ["[1]", "nonsense", '{"choices":3}', '{"choices":[{"delta":{"tool_calls":[{"index":"x"}]}}]}'],
)
def test_a_frame_that_is_none_is_left_out(data: str) -> None:
    events = ResponseEvents(a_response(stream=True))
    events.translate_frame(data_frame({"choices": []}))
    assert events.translate_frame(f"data: {data}\n\n".encode()) == b""
    with pytest.raises(ApiError, match=r"^cannot answer"):
        events.translate_body(data.encode())


def test_a_stream_that_breaks_ends_in_its_failure_with_what_was_said() -> None:
    events = ResponseEvents(a_response(stream=True))
    told = _events(events, [data_frame({"choices": [{"delta": {"content": "hel"}}]})])
    failed = events.failed(ApiError(ErrorCode.UPSTREAM, "cannot go on"))
    # What is an event already stays as it is, and so do comments.
    assert events.translate_frame(failed) == failed
    assert events.translate_frame(b": continued\n\n") == b": continued\n\n"
    last = _read(failed)
    assert last["sequence_number"] == told[-1]["sequence_number"] + 1
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"] == "cannot go on"
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "hel")


def _events(events: ResponseEvents, frames: list[bytes]) -> list[dict[str, Any]]:
    told = b"".join(events.translate_frame(frame) for frame in frames)
    return [_read(event) for event in split_frames(told)]


def _read(event: bytes) -> dict[str, Any]:
    """Read one event, as the official SDK would too."""
    name, data = event.decode().rstrip("\n").split("\n")
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    EVENTS[body["type"]].model_validate(body, strict=True)
    return body
