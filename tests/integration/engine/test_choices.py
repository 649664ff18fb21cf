"""Several answers to one request, with the `openai` client and the real engine behind a router."""

import json
from typing import Any

import aiohttp
import openai
import pytest

from tests.integration.engine.test_server import CHAT, LONG, chat, stats, until
from tests.integration.engine.test_tools_sdk import HELD

pytestmark = pytest.mark.model

SHIP: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Invent a name for a ship, and say why."}],
    "temperature": 1.2,
    "max_tokens": 24,
}


async def said(client: openai.AsyncOpenAI, **fields: Any) -> list[str]:
    answer = await client.chat.completions.create(**{**SHIP, **fields})
    assert [choice.index for choice in answer.choices] == list(range(fields.get("n", 1)))
    return [choice.message.content or "" for choice in answer.choices]


async def test_choices_differ_and_a_seed_repeats_them(
    client: openai.AsyncOpenAI, http: aiohttp.ClientSession
) -> None:
    before = await stats(http)
    four = await said(client, n=4, seed=7)
    seen = await stats(http)
    assert len(set(four)) == 4
    assert await said(client, n=4, seed=7) == four
    # Each draws as if it were alone, with the seed that is its own.
    assert await said(client, seed=9) == four[2:3]
    # The engine read the prompt once.
    (alone,) = (await client.chat.completions.create(**SHIP)).choices[:1]
    assert alone.finish_reason in ("stop", "length")
    tokens = seen["prompt_tokens_total"] - before["prompt_tokens_total"]
    answer = await client.chat.completions.create(**{**SHIP, "n": 3, "max_tokens": 5})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens
    assert answer.usage.completion_tokens <= 15
    await until(http, open=0, kv_blocks_used=0)


async def test_streamed_choices_equal_complete_ones(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**{**SHIP, "n": 3, "seed": 3, "stop": "."})
    texts, ends, roles = ["", "", ""], ["", "", ""], set()
    usage = None
    async for chunk in await client.chat.completions.create(
        **{**SHIP, "n": 3, "seed": 3, "stop": "."},
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not ends[choice.index]
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ""
            if choice.delta.role:
                roles.add(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert roles == {0, 1, 2}
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_every_choice_calls_its_tools_and_obeys_its_grammar(
    client: openai.AsyncOpenAI,
) -> None:
    ask = {**HELD, "messages": SHIP["messages"], "temperature": 1.0, "seed": 1, "n": 3}
    answer = await client.chat.completions.create(**ask, tool_choice="required")
    ids = set()
    for choice in answer.choices:
        assert choice.finish_reason in ("tool_calls", "length")
        for call in choice.message.tool_calls or []:
            ids.add(call.id)
            assert call.type == "function"
            assert call.function.name in ("get_weather", "get_time")
    assert len(ids) >= 3
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2, 3, 4, 5, 6, 7, 8, 9]}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for text in await said(client, n=3, seed=1, max_tokens=80, response_format=form):
        assert json.loads(text)["n"] in range(1, 10)


async def test_several_prompts_in_one_request(client: openai.AsyncOpenAI) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4, 5,"]
    fields: dict[str, Any] = {"model": "smollm2", "max_tokens": 6, "temperature": 0}
    together = await client.completions.create(prompt=prompts, n=2, **fields)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.usage is not None
    tokens = 0
    for at, prompt in enumerate(prompts):
        alone = await client.completions.create(prompt=prompt, **fields)
        assert alone.usage is not None
        tokens += alone.usage.prompt_tokens
        wanted = alone.choices[0].text
        assert [choice.text for choice in together.choices[2 * at : 2 * at + 2]] == [wanted] * 2
    assert together.usage.prompt_tokens == tokens
    assert together.usage.completion_tokens == 24


async def test_more_answers_than_run_at_once_are_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot give 9 answers"):
        await said(client, n=9)


async def test_a_client_that_disconnects_ends_all_its_choices(http: aiohttp.ClientSession) -> None:
    await until(http, running=0, kv_blocks_used=0)
    body = {**chat(LONG), "stream": True, "ignore_eos": True, "max_tokens": 1000, "n": 4}
    async with http.post(CHAT, json=body) as response:
        await until(http, running=4)
        response.close()
    await until(http, running=0, waiting=0, kv_blocks_used=0, open=0)
