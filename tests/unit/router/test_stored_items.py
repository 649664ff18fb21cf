"""Items get ids when they are stored, and the events of a stored response are always the same."""

import json
from typing import Any, cast, get_args

import pytest
from openai.types.responses import ResponseStreamEvent

from isochrone.wire.errors import ApiError
from router.apis.responses.items import identified, input_of, parse_items
from router.apis.responses.replay import closing_events, opening_events
from router.apis.responses.stored import StoredResponses
from router.apis.responses.translate import refuse_links
from router.dataplane import sse

EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}
TEXT = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
OUTPUT: list[dict[str, Any]] = [
    {
        "id": "rs_0",
        "type": "reasoning",
        "summary": [],
        "status": "completed",
        "content": [{"type": "reasoning_text", "text": "hm"}],
    },
    {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "status": "completed",
    },
    {
        "id": "msg_2",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [TEXT],
    },
    {
        "id": "fc_3",
        "type": "function_call",
        "status": "completed",
        "call_id": "c",
        "name": "f",
        "arguments": '{"a":1}',
    },
]
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 7,
    "model": "tiny",
    "status": "completed",
    "output": OUTPUT,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "error": None,
    "incomplete_details": None,
    "usage": None,
}


def events_of(frames: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(sse.frame_data(frame) or b"") for frame in frames]


def test_text_becomes_an_item() -> None:
    (item,) = input_of(b'{"model":"m","input":"hi"}', "r")
    assert item == {
        "type": "message",
        "role": "user",
        "status": "completed",
        "id": "msg_r_0",
        "content": [{"type": "input_text", "text": "hi"}],
    }


def test_items_keep_their_ids_and_fields() -> None:
    given: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "id": "mine", "status": "incomplete"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    stored = identified(given, "r", "input")
    assert [item["id"] for item in stored] == ["mine", "fc_r_1", "fco_r_2"]
    assert stored[0]["status"] == "incomplete"
    assert stored[0]["content"][0]["type"] == "output_text"
    assert len(parse_items(stored, "input")) == 3


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"id": "a/b", "content": "x"}], "items[0].id"),
        ([{"id": 3, "content": "x"}], "items[0].id"),
        ([{"id": "a", "content": "x"}, {"id": "a", "content": "x"}], "items[1].id"),
    ],
)
def test_an_id_that_cannot_be_used_is_refused(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        identified(items, "r", "items")
    assert refused.value.param == param


def test_a_stored_response_has_valid_events_in_order() -> None:
    frames = [*opening_events(RESPONSE, -1), *closing_events(RESPONSE, -1)]
    events = events_of(frames)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    assert events[-1]["response"]["output"] == OUTPUT
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert deltas == ["hm", "hm", "hi", '{"a":1}']


@pytest.mark.parametrize("starting_after", [-1, 0, 1, 5, 99])
def test_a_client_goes_on_where_it_stopped(starting_after: int) -> None:
    whole = [*opening_events(RESPONSE, -1), *closing_events(RESPONSE, -1)]
    rest = [*opening_events(RESPONSE, starting_after), *closing_events(RESPONSE, starting_after)]
    assert rest == whole[starting_after + 1 :]


def test_a_cancelled_response_ends_its_stream() -> None:
    frames = closing_events({**RESPONSE, "status": "cancelled", "output": []}, -1)
    (last,) = events_of(frames)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "is_needed"),
    [
        (b'"store": true', True),
        (b'"st\\u006fre": true', True),
        (b'"\\u0073tore": true', True),
        (b'"previous\\u005fresponse_id": "resp_1"', True),
        (b'"store": false', False),
        (b'"\\u0073tore": false', False),
        (b'"instructions": "\\u00e9\\n\\u0041"', False),
    ],
)
def test_the_fields_of_a_stored_response_count_however_they_are_written(
    fields: bytes, is_needed: bool
) -> None:
    unused = cast(Any, None)
    stored = StoredResponses(
        client=unused,
        openai=unused,
        serve=unused,
        metrics=unused,
        charge=lambda *_: None,
        is_default=False,
    )
    body = b'{"model": "m", "input": "x", ' + fields + b"}"
    assert stored.is_needed(body) is is_needed


def test_a_wrong_role_of_an_item_lists_the_roles() -> None:
    with pytest.raises(ApiError) as refused:
        parse_items([{"role": "boss", "content": "x"}], "input")
    assert refused.value.message.startswith(
        "cannot use field 'input[0].role': 'boss' is not one of"
    )
    assert "'user'" in refused.value.message


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_0"},
        {"type": "message", "role": "user", "content": [{"type": "input_image"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_file"}]},
    ],
)
def test_a_refused_item_is_named_by_the_field_that_it_is_in(item: dict[str, Any]) -> None:
    for field in ("items", "input"):
        with pytest.raises(ApiError) as refused:
            parse_items([item], field)
        assert refused.value.param == field


def test_links_to_images_are_not_stored_where_they_are_not_fetched() -> None:
    image: Any = {"type": "input_image", "image_url": "https://example.com/a.png"}
    data: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    message: Any = {"type": "message", "role": "user", "content": [image]}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": [data, image]}
    for items in ([message], [{"type": "message", "role": "user", "content": "x"}, output]):
        with pytest.raises(ApiError, match="expected a `data:` URL with the file in base64"):
            refuse_links(parse_items(items, "items"), "items")
    allowed = {"type": "message", "role": "user", "content": [data]}
    refuse_links(parse_items([allowed], "items"), "items")
