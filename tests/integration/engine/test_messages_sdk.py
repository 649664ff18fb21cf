"""Anthropic's Messages with the official client and the real engine behind a router."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.integration.engine.conftest import EngineNode, EngineProcess
from tests.integration.router.fleet_of import KEY, a_bench, a_key, a_route, a_table

pytestmark = pytest.mark.model

WEATHER: Any = {
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
GREEDY: dict[str, Any] = {"model": "smollm2", "extra_body": {"temperature": 0}}


@pytest.fixture
async def claude(engine: EngineProcess, tmp_path: Path) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client, of a router before the engine."""
    node = EngineNode(engine)
    patient: dict[str, Any] = {"first_byte_timeout_s": 60.0, "stream_idle_timeout_s": 30.0}
    async with a_bench(tmp_path, [node], **patient) as bench:
        table = a_table([a_route(node)], generation=2, keys=[a_key()], names=("smollm2",))
        bench.app.fleet.adopt(table)
        async with anthropic.AsyncAnthropic(
            base_url=bench.url,
            api_key=KEY,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        ) as sdk:
            yield sdk


async def test_the_count_of_tokens_is_that_of_the_answer(claude: anthropic.AsyncAnthropic) -> None:
    conversation: dict[str, Any] = {
        "model": "smollm2",
        "system": "Be brief.",
        "tools": [WEATHER],
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    }
    counted = await claude.messages.count_tokens(**conversation)
    for _ in range(2):
        answer = await claude.messages.create(max_tokens=1, **conversation)
        usage = answer.usage
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == counted.input_tokens
    # The second answer reads whole blocks of the prompt from the prefix cache.
    assert cached > 0


async def test_a_tool_is_called_and_its_result_is_read(claude: anthropic.AsyncAnthropic) -> None:
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    choice: Any = {"type": "tool", "name": "get_weather"}
    async with claude.messages.stream(
        **GREEDY, max_tokens=80, messages=[question], tools=[WEATHER], tool_choice=choice
    ) as stream:
        message = await stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert set(call.input) == {"city"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 20 C."}
    answer = await claude.messages.create(
        **GREEDY,
        max_tokens=8,
        tools=[WEATHER],
        messages=[
            question,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
    )
    assert answer.usage.output_tokens > 0


async def test_the_stop_sequence_is_named(claude: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {
        **GREEDY,
        "max_tokens": 40,
        "messages": [
            {"role": "user", "content": "Count from one to five."},
            {"role": "assistant", "content": "1, 2, 3,"},
        ],
    }
    whole = await claude.messages.create(**asked)
    assert whole.content[0].type == "text"
    # The answer goes on where the client's beginning ended.
    stop = whole.content[0].text.strip()[:1]
    assert stop == "4"
    stopped = await claude.messages.create(**asked, stop_sequences=["unheard of", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    async with claude.messages.stream(**asked, stop_sequences=[stop]) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


async def test_images_are_refused_by_an_engine_without_them(
    claude: anthropic.AsyncAnthropic,
) -> None:
    pixel = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    source: Any = {"type": "base64", "media_type": "image/gif", "data": pixel}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(anthropic.BadRequestError, match="only content parts of type 'text'"):
        await claude.messages.create(
            model="smollm2", max_tokens=8, messages=[{"role": "user", "content": content}]
        )
