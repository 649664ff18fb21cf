"""The mock engine's tool calls: a conversation says which, and a loop of them ends."""

import json
from typing import Any

import pytest

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError
from nodeagent.mock import openai
from nodeagent.mock.answers import MockAnswerEncoder
from nodeagent.mock.engine import MockEngine, MockToken

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "write")]
SCRIPT = 'Do this:\ncall look {"at": "a"}\ncall write {"text": "b"}\nthen\ncall look {"at": "c"}\n'
CONFIG = EngineConfig(socket="", model_path="", served_name="m", context_tokens_max=1000)


async def answer(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the only choice of a complete answer, held against the stream of the same tokens."""
    body = openai.decode(json.dumps({"messages": messages, "tools": TOOLS, **fields}).encode())
    request = openai.mock_request(body, is_chat=True, salt="")
    tokens = [token async for token in MockEngine(CONFIG).generate(request)]
    encoder = MockAnswerEncoder(
        is_chat=True, request_id="r", model="m", created=1, alternatives=None
    )
    (choice,) = json.loads(encoder.complete([tokens], {}))["choices"]
    message = choice["message"]
    assert streamed(encoder, tokens) == (message["content"] or "", message.get("tool_calls") or [])
    return dict(choice)


def streamed(
    encoder: MockAnswerEncoder, tokens: list[MockToken]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the calls that a client makes of the chunks."""
    text = ""
    calls: list[dict[str, Any]] = []
    for token in tokens:
        data = json.loads(encoder.token_chunk(token).removeprefix(b"data: "))
        delta = data["choices"][0]["delta"]
        text += delta.get("content", "")
        for piece in delta.get("tool_calls", []):
            index = piece.pop("index")
            if "id" in piece:
                assert index == len(calls)
                calls.append(piece)
            else:
                calls[index]["function"]["arguments"] += piece["function"]["arguments"]
    return text, calls


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


async def loop(**fields: Any) -> tuple[list[list[tuple[str, str]]], str]:
    """Return the calls of each answer until one has none, and that one's text."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": SCRIPT}]
    steps: list[Any] = []
    for _ in range(5):
        choice = await answer(messages, **fields)
        if choice["finish_reason"] != "tool_calls":
            assert choice["finish_reason"] == "stop"
            return steps, choice["message"]["content"]
        steps.append(calls_of(choice))
        messages.append(choice["message"])
        for call in choice["message"]["tool_calls"]:
            content = f"saw {call['function']['arguments']}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    raise AssertionError("the loop does not end")


LOOK, WRITE, AGAIN = ("look", '{"at": "a"}'), ("write", '{"text": "b"}'), ("look", '{"at": "c"}')


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, [[LOOK, WRITE], [AGAIN]]),
        ({"parallel_tool_calls": False}, [[LOOK], [WRITE], [AGAIN]]),
        ({"n": 1, "stop": ["a"]}, [[LOOK, WRITE], [AGAIN]]),
    ],
    ids=["parallel", "one at a time", "stop strings are for texts"],
)
async def test_a_loop_makes_each_call_once_and_ends(fields: dict[str, Any], steps: Any) -> None:
    made, text = await loop(**fields)
    assert made == steps
    if "stop" not in fields:
        assert text == 'done: saw {"at": "a"} saw {"text": "b"} saw {"at": "c"} '


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("say something", {}),
        ('call unknown {"at": "a"}', {}),
        ('call look {"at": }', {}),
        ("call look ['at']", {}),
        (SCRIPT, {"tool_choice": "none"}),
        (SCRIPT, {"tools": None}),
    ],
    ids=["no line", "no such tool", "no JSON", "no object", "none", "no tools"],
)
async def test_without_a_script_tokens_are_numbered(text: str, fields: dict[str, Any]) -> None:
    choice = await answer([{"role": "user", "content": text}], max_tokens=2, **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("t0 t1 ", "length")


async def test_a_new_message_of_the_user_begins_again() -> None:
    made = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": 'call look {"at": "old"}'},
        {"role": "assistant", "tool_calls": made},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": [{"type": "text", "text": 'call look {"at": "new"}'}]},
    ]
    assert calls_of(await answer(messages)) == [("look", '{"at": "new"}')]


async def test_a_call_is_cut_off_at_the_limit() -> None:
    choice = await answer(
        [{"role": "user", "content": 'call look {"at": "a long value"}'}], max_tokens=2
    )
    assert choice["finish_reason"] == "length"
    assert calls_of(choice) == [("look", '{"at": "a lo')]


PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}, "days": {"type": "integer", "minimum": 2}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def weather(*, strict: bool) -> dict[str, Any]:
    function = {"name": "weather", "parameters": PLACE, "strict": strict}
    return {"tools": [*TOOLS, {"type": "function", "function": function}]}


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "calls"),
    [(NAMED, [("weather", '{"city":"Rome","days":2}')]), ("required", [("look", "{}")])],
    ids=["named", "required"],
)
async def test_a_forced_call_follows_the_schema_of_its_function(
    choice: Any, calls: list[tuple[str, str]]
) -> None:
    messages = [{"role": "user", "content": "Is it warm?"}]
    choice = await answer(messages, tool_choice=choice, **weather(strict=False))
    assert calls_of(choice) == calls
    assert choice["finish_reason"] == "tool_calls"


async def test_a_script_says_which_call_is_made_where_one_is_forced() -> None:
    messages = [{"role": "user", "content": SCRIPT + 'call weather {"city": "Bonn"}'}]
    fields = {"tool_choice": NAMED, **weather(strict=False)}
    assert calls_of(await answer(messages, **fields)) == [("weather", '{"city": "Bonn"}')]


@pytest.mark.parametrize(
    ("choice", "tools", "reason"),
    [
        ("required", None, "no tools to call"),
        ("required", [], "no tools to call"),
        ({"type": "function", "function": {"name": "absent"}}, TOOLS, "no tool has the name"),
    ],
    ids=["none", "empty", "absent"],
)
async def test_a_call_that_cannot_be_forced_is_refused(
    choice: Any, tools: Any, reason: str
) -> None:
    with pytest.raises(ApiError, match=reason):
        await answer([{"role": "user", "content": "x"}], tools=tools, tool_choice=choice)


async def test_a_scripted_call_of_a_strict_tool_must_follow_its_schema() -> None:
    fits = [{"role": "user", "content": 'call weather {"city": "Rome", "days": 3}'}]
    breaks = [{"role": "user", "content": 'call weather {"city": "Rome"}'}]
    assert calls_of(await answer(fits, **weather(strict=True)))
    assert calls_of(await answer(breaks, **weather(strict=False)))
    with pytest.raises(ApiError, match="must have `days`"):
        await answer(breaks, **weather(strict=True))


FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


async def test_an_answer_has_the_form_that_the_request_asks_for() -> None:
    messages = [{"role": "user", "content": "Where is it warm?"}]
    choice = await answer(messages, response_format=FORMAT)
    assert choice["message"]["content"] == '{"city":"Rome","days":2}'
    assert choice["finish_reason"] == "stop"
    choice = await answer(messages, response_format={"type": "json_object"})
    assert choice["message"]["content"] == "{}"


async def test_calls_come_before_an_answer_in_the_form_that_the_request_asks_for() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": 'call look {"at": "it"}'}]
    fields = {"tools": TOOLS, "response_format": FORMAT}
    first = await answer(messages, **fields)
    assert calls_of(first) == [("look", '{"at": "it"}')]
    messages += [first["message"], {"role": "tool", "content": "seen"}]
    last = await answer(messages, **fields)
    assert json.loads(last["message"]["content"]) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "json_schema"}, "json_schema is missing"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "a"}}},
            "cannot answer in this form",
        ),
    ],
    ids=["missing", "unsupported"],
)
async def test_a_form_that_it_cannot_follow_is_refused(form: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        await answer([{"role": "user", "content": "x"}], response_format=form)
