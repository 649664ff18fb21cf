"""Tools with the official `openai` client and the real engine behind a router."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

pytestmark = pytest.mark.model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 12}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
HELD = {"model": "smollm2", "temperature": 0, "max_tokens": 120, "tools": [WEATHER, CLOCK]}


def check(name: str, arguments: str) -> None:
    """Hold a call to its tool's schema."""
    value = json.loads(arguments)
    if name == "get_weather":
        assert set(value) == {"city", "unit"}
        assert value["unit"] in ("celsius", "fahrenheit")
    else:
        assert name == "get_time"
        assert set(value) == {"zone"}


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    body = {**HELD, "messages": ASK, **fields}
    answer = await client.chat.completions.create(**body)
    return answer.choices[0]


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[list[list[str]], str]:
    """Return each call's id, name and arguments, and why the stream ended."""
    calls: list[list[str]] = []
    finish = ""
    body = {**HELD, "messages": ASK, **fields}
    async for chunk in await client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls)
                    assert call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                assert call.index == len(calls) - 1
                calls[-1][2] += call.function.arguments
    return calls, finish


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
    ids=["required", "named"],
)
async def test_a_required_call_is_made_streamed_and_complete(
    client: openai.AsyncOpenAI, choice: Any, names: set[str]
) -> None:
    answer = await whole(client, tool_choice=choice, parallel_tool_calls=False)
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.id.startswith("call_")
    assert call.function.name in names
    check(call.function.name, call.function.arguments)
    calls, finish = await streamed(client, tool_choice=choice, parallel_tool_calls=False)
    assert finish == "tool_calls"
    ((_, name, arguments),) = calls
    assert (name, arguments) == (call.function.name, call.function.arguments)


async def test_several_calls_in_one_answer_are_separate(client: openai.AsyncOpenAI) -> None:
    # A model this small calls until its tokens are spent; each call that is whole must hold.
    calls, finish = await streamed(
        client, tool_choice="required", temperature=1.0, seed=4, max_tokens=200
    )
    assert finish in ("tool_calls", "length")
    assert len({one[0] for one in calls}) == len(calls) >= 1
    for _, name, arguments in calls if finish == "tool_calls" else calls[:-1]:
        check(name, arguments)


async def test_with_auto_a_call_is_parsed_and_its_result_is_used(
    client: openai.AsyncOpenAI,
) -> None:
    first = await whole(client, tool_choice="required", parallel_tool_calls=False)
    (call,) = first.message.tool_calls
    # The model has called so before, and is asked the same again: by itself it calls again.
    asked: list[Any] = []
    for _ in range(3):
        asked += [
            *ASK,
            first.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'},
            {"role": "assistant", "content": "It is 21 degrees."},
        ]
    again = await whole(client, messages=[*asked, *ASK], tool_choice="auto")
    assert again.finish_reason == "tool_calls", again.message.content
    assert again.message.tool_calls[0].function.name == "get_weather"
    calls, finish = await streamed(client, messages=[*asked, *ASK])
    assert finish == "tool_calls"
    assert calls[0][1:] == [
        again.message.tool_calls[0].function.name,
        again.message.tool_calls[0].function.arguments,
    ]
    told = await whole(client, messages=[*asked, *ASK], tool_choice="none")
    assert told.message.tool_calls is None


async def test_without_a_call_the_answer_is_plain_and_streams(client: openai.AsyncOpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Say hello."}]
    answer = await whole(client, messages=question, max_tokens=20)
    assert answer.message.content
    assert answer.message.tool_calls is None
    assert answer.finish_reason in ("stop", "length")


async def test_invalid_tools_are_a_400(client: openai.AsyncOpenAI) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    for fields in (
        {"tools": [bad], "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
    ):
        with pytest.raises(openai.BadRequestError, match="cannot"):
            await whole(client, **fields)


async def test_structured_output_passes_the_router(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
              "additionalProperties": False}  # fmt: skip
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Is Paris in France?"}],
        max_tokens=60,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"yes"}
