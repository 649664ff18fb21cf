"""Tools with `defer_loading` are offered to the model once a `tool_reference` names them."""

import json
from typing import Any

import msgspec
import pytest

from isochrone.wire.errors import ApiError
from router.apis.messages.schema import COUNT_TOKENS_REQUEST, MESSAGES_REQUEST
from router.apis.messages.translate import to_chat, to_tokenize
from router.apis.openai.decode import decode

SCHEMA = {"type": "object", "properties": {}}
SEARCH = {"name": "search", "input_schema": SCHEMA}


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA, "defer_loading": True}


def found(*names: str, **fields: Any) -> list[dict[str, Any]]:
    """Return a call of the search, and its result."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "t", "content": references, **fields}
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def body(*turns: list[dict[str, Any]], **fields: Any) -> bytes:
    turn = {"role": "user", "content": "hi"}
    messages = [turn, *(message for messages in turns for message in messages)]
    tools = [tool("a"), SEARCH, tool("b"), tool("c")]
    given = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, **fields}
    return json.dumps(given).encode()


def chat(*turns: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(to_chat(decode(body(*turns, **fields), MESSAGES_REQUEST)))
    return given


def offered(given: dict[str, Any]) -> list[str]:
    return [each["function"]["name"] for each in given["tools"]]


@pytest.mark.parametrize(
    ("turns", "names"),
    [
        ([], ["search"]),
        ([found("c")], ["search", "c"]),
        ([found("c"), found("a", "c")], ["search", "c", "a"]),
        ([found("search")], ["search"]),
    ],
    ids=["none is found", "one", "more later", "one that was not deferred"],
)
def test_what_was_found_follows_what_is_not_deferred(
    turns: list[list[dict[str, Any]]], names: list[str]
) -> None:
    assert offered(chat(*turns)) == names


def test_the_model_reads_in_the_result_which_tools_it_found() -> None:
    text = {"type": "text", "text": "two of three"}
    turns = found("a", "b")
    turns[1]["content"][0]["content"].insert(0, text)
    given = chat(turns)
    assert given["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "t",
        "content": "two of three\nTool found, and now available: a\n"
        "Tool found, and now available: b",
    }
    assert "defer_loading" not in json.dumps(given)


def test_a_tool_that_must_be_called_is_offered() -> None:
    given = chat(found("a"), tool_choice={"type": "tool", "name": "c"})
    assert offered(given) == ["search", "a", "c"]
    assert given["tool_choice"] == {"type": "function", "function": {"name": "c"}}


def test_the_same_tools_are_counted() -> None:
    given = json.loads(body(found("b")))
    del given["max_tokens"]
    counted = decode(msgspec.json.encode(given), COUNT_TOKENS_REQUEST)
    assert offered(json.loads(to_tokenize(counted))) == ["search", "b"]


@pytest.mark.parametrize(
    ("turns", "fields", "named"),
    [
        ([found("gone")], {}, "'messages': no tool of 'tools' has the name 'gone'"),
        ([found("gone")], {"tools": None}, "'messages': no tool of 'tools' has the name 'gone'"),
        ([], {"tools": [tool("a")]}, "'tools': all have 'defer_loading'"),
        (
            [],
            {"tools": [SEARCH, {"type": "tool_search_tool_regex_20251119", "name": "s"}]},
            "tools[1]",
        ),
    ],
    ids=["an unknown tool", "no tools", "all are deferred", "a search that Anthropic runs"],
)
def test_what_cannot_be_offered_is_refused(
    turns: list[list[dict[str, Any]]], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ApiError) as refused:
        chat(*turns, **fields)
    assert named in refused.value.message, refused.value.message
