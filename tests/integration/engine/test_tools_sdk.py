"""Tools by the official `openai` client: the real engine behind a router, streamed and whole."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.integration.engine.conftest import EngineProcess
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench, a_key, a_route, a_table

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


class EngineNode(FakeNode):
    """A node whose every request is answered by the real engine."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self._engine = engine

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        async with (
            self._engine.session() as http,
            http.post(request.path, data=body) as answer,
        ):
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


@pytest.fixture
async def client(engine: EngineProcess, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    node = EngineNode(engine)
    patient: dict[str, Any] = {"first_byte_timeout_s": 60.0, "stream_idle_timeout_s": 30.0}
    async with a_bench(tmp_path, [node], **patient) as bench:
        table = a_table([a_route(node)], generation=2, keys=[a_key()], names=("smollm2",))
        bench.house.fleet.adopt(table)
        async with openai.AsyncOpenAI(
            base_url=f"{bench.url}/v1",
            api_key=KEY,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as sdk:
            yield sdk


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
async def test_who_must_call_calls_whole_and_streamed(
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


async def test_several_calls_in_one_answer_keep_apart(client: openai.AsyncOpenAI) -> None:
    # A model this small calls until its tokens are spent; each call that is whole must hold.
    calls, finish = await streamed(
        client, tool_choice="required", temperature=1.0, seed=4, max_tokens=200
    )
    assert finish in ("tool_calls", "length")
    assert len({one[0] for one in calls}) == len(calls) >= 1
    for _, name, arguments in calls if finish == "tool_calls" else calls[:-1]:
        check(name, arguments)


async def test_auto_reads_a_call_and_the_tools_answer_comes_back_in(
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


async def test_tools_that_cannot_be_used_are_a_400(client: openai.AsyncOpenAI) -> None:
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
