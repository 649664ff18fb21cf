"""Loops of tool calls with the official SDKs, unmodified, until the model calls no more tools.

The mock engine makes the calls that the first message asks for: two together, then one.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.integration.router.fleet_of import a_bench
from tests.integration.router.mock_node import MockNode
from tests.integration.router.test_anthropic_sdk import a_client as anthropic_client
from tests.integration.router.test_openai_sdk import a_client as openai_client

SCRIPT = """
call weather {"city": "Paris"}
call clock {"zone": "CET"}
then
call weather {"city": "Rome"}
"""
EXPECTED = [
    [("weather", {"city": "Paris"}), ("clock", {"zone": "CET"})],
    [("weather", {"city": "Rome"})],
]
END = "done: sunny in Paris noon in CET sunny in Rome"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
SCHEMAS = {"weather": CITY, "clock": ZONE}
STEPS_MAX = 5


def result_of(name: str, arguments: dict[str, Any]) -> str:
    """Return what a tool says."""
    return f"sunny in {arguments['city']}" if name == "weather" else f"noon in {arguments['zone']}"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Any]:
    async with a_bench(tmp_path, [MockNode()]) as started:
        yield started


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("in_parallel", [True, False])
async def test_chats(bench: Any, streams: bool, in_parallel: bool) -> None:
    functions = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    request: dict[str, Any] = {
        "model": "tiny",
        "tools": [{"type": "function", "function": function} for function in functions],
        "parallel_tool_calls": in_parallel,
    }
    messages: list[Any] = [{"role": "user", "content": SCRIPT}]
    steps: list[Any] = []
    async with openai_client(bench) as client:
        for _ in range(STEPS_MAX):
            if streams:
                async with client.chat.completions.stream(messages=messages, **request) as stream:
                    kinds = [event.type async for event in stream]
                    (choice,) = (await stream.get_final_completion()).choices
                is_end = choice.finish_reason == "stop"
                assert ("tool_calls.function.arguments.done" in kinds) is not is_end
            else:
                answer = await client.chat.completions.create(messages=messages, **request)
                (choice,) = answer.choices
            messages.append(choice.message.model_dump(exclude_none=True))
            if choice.finish_reason == "stop":
                break
            assert choice.finish_reason == "tool_calls"
            calls = choice.message.tool_calls or []
            steps.append([(c.function.name, json.loads(c.function.arguments)) for c in calls])
            for call, (name, arguments) in zip(calls, steps[-1], strict=True):
                said = {"tool_call_id": call.id, "content": result_of(name, arguments)}
                messages.append({"role": "tool", **said})
    assert messages[-1]["content"].strip() == END
    assert steps == (EXPECTED if in_parallel else [[call] for step in EXPECTED for call in step])


@pytest.mark.parametrize("streams", [False, True])
async def test_responses(bench: Any, streams: bool) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "tools": [
            {"type": "function", "name": name, "parameters": schema, "strict": False}
            for name, schema in SCHEMAS.items()
        ],
    }
    items: list[Any] = [{"role": "user", "content": SCRIPT}]
    steps: list[Any] = []
    async with openai_client(bench) as client:
        for _ in range(STEPS_MAX):
            if streams:
                async with client.responses.stream(input=items, **request) as stream:
                    kinds = [event.type async for event in stream]
                    answer: Any = await stream.get_final_response()
                assert kinds[-1] == "response.completed"
            else:
                answer = await client.responses.create(input=items, **request)
            assert answer.status == "completed"
            calls = [item for item in answer.output if item.type == "function_call"]
            items += answer.output
            if not calls:
                break
            steps.append([(call.name, json.loads(call.arguments)) for call in calls])
            for call, (name, arguments) in zip(calls, steps[-1], strict=True):
                said = {"call_id": call.call_id, "output": result_of(name, arguments)}
                items.append({"type": "function_call_output", **said})
    assert answer.output_text.strip() == END
    assert steps == EXPECTED


@pytest.mark.parametrize("streams", [False, True])
async def test_messages(bench: Any, streams: bool) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "tools": [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()],
    }
    messages: list[Any] = [{"role": "user", "content": SCRIPT}]
    steps: list[Any] = []
    counts = []
    async with anthropic_client(bench) as client:
        for _ in range(STEPS_MAX):
            counted = await client.messages.count_tokens(messages=messages, **request)
            counts.append(counted.input_tokens)
            fields = {**request, "max_tokens": 1000, "messages": messages}
            if streams:
                async with client.messages.stream(**fields) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await client.messages.create(**fields)
            usage = answer.usage
            assert counts[-1] == usage.input_tokens + (usage.cache_read_input_tokens or 0)
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason == "end_turn":
                break
            assert answer.stop_reason == "tool_use"
            calls = [block for block in answer.content if block.type == "tool_use"]
            steps.append([(call.name, call.input) for call in calls])
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": result_of(call.name, call.input),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    assert answer.content[0].text.strip() == END
    assert steps == EXPECTED
    assert counts == sorted(set(counts))


@anthropic.beta_async_tool
async def weather(city: str) -> str:
    """Return the weather in a city."""
    return result_of("weather", {"city": city})


@anthropic.beta_async_tool
async def clock(zone: str) -> str:
    """Return the time in a zone."""
    return result_of("clock", {"zone": zone})


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_runner(bench: Any, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": SCRIPT}]
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 1000, "messages": messages}
    tools: list[Any] = [weather, clock]
    async with anthropic_client(bench) as client:
        runner: Any = client.beta.messages.tool_runner(**request, tools=tools, stream=streams)
        answers = [await turn.get_final_message() if streams else turn async for turn in runner]
    made = [
        [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
        for answer in answers
    ]
    assert made == [*EXPECTED, []]
    assert answers[-1].content[0].text.strip() == END


async def test_a_call_that_the_limit_cuts_off_is_incomplete(bench: Any) -> None:
    content = 'call weather {"city": "Llanfairpwllgwyngyll"}'
    messages: list[Any] = [{"role": "user", "content": content}]
    function: dict[str, Any] = {"name": "weather", "parameters": CITY}
    chat_tools: list[Any] = [{"type": "function", "function": function}]
    tools: list[Any] = [{"type": "function", "strict": False, **function}]
    async with openai_client(bench) as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=messages, tools=chat_tools, max_tokens=2
        )
        assert chat.choices[0].finish_reason == "length"
        answer: Any = await client.responses.create(
            model="tiny", input=content, max_output_tokens=2, tools=tools
        )
        assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
