"""The official clients, unmodified, with a fleet of three cities whose only engines are in one."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from cloudflare import AsyncCloudflare
from openai import AsyncOpenAI

from tests.integration.router import test_node_sdks as node_sdks
from tests.system.harness import CITIES, Fleet, a_fleet, until

SLASHED = "@cf/meta/tiny:8b"
NAMES = {"tiny": "tiny", "slashed": SLASHED}
"""The names that the scripts for Node.js ask for."""

MESSAGES: Any = [{"role": "user", "content": "hi there"}]
ENDLESS = 4000
"""Tokens, which take forty seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CITIES, "iad", ("US", 38.9, -77.4))
        async with a_fleet() as running:
            await running.deploy(1, keep_warm=["ams"])
            mock = await running.ask("GET", "/v1/deployments/mock")
            for deployment_id, name in NAMES.items():
                fields = {key: mock[key] for key in ("model_id", "engine", "policy")}
                body = {"deployment_id": deployment_id, "name": name, **fields}
                await running.ask("POST", "/v1/deployments", body)
            await until("all are warm", lambda: running.is_warm(1 + len(NAMES)))
            await running.routers_know()
            yield running


async def requests_running(fleet: Fleet) -> int:
    """Return how many requests the engines of the fleet process."""
    running = 0
    for socket in fleet.folder.glob("node-*/engines/*/engine.sock"):
        connector = aiohttp.UnixConnector(str(socket))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get("http://engine/stats") as response,
        ):
            running += (await response.json())["running"]
    return running


async def chats(url: str, key: str, tokens: int) -> AsyncIterator[str]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        async for chunk in await client.chat.completions.create(
            model="mock", messages=MESSAGES, max_tokens=tokens, stream=True
        ):
            yield chunk.choices[0].finish_reason or chunk.choices[0].delta.content or ""


async def completions(url: str, key: str, tokens: int) -> AsyncIterator[str]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        async for chunk in await client.completions.create(
            model="mock", prompt="hi", max_tokens=tokens, stream=True
        ):
            yield chunk.choices[0].finish_reason or chunk.choices[0].text


async def responses(url: str, key: str, tokens: int) -> AsyncIterator[str]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        async for event in await client.responses.create(
            model="mock", input="hi", max_output_tokens=tokens, stream=True
        ):
            yield event.type


async def messages(url: str, key: str, tokens: int) -> AsyncIterator[str]:
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        async for event in await client.messages.create(
            model="mock", messages=MESSAGES, max_tokens=tokens, stream=True
        ):
            yield event.type


async def runs(url: str, key: str, tokens: int) -> AsyncIterator[str]:
    base = f"{url}/client/v4"
    async with (
        AsyncCloudflare(base_url=base, api_token=key, max_retries=0) as client,
        client.ai.with_streaming_response.run(
            SLASHED, account_id="any", prompt="hi", max_tokens=tokens, stream=True
        ) as answer,
    ):
        async for line in answer.iter_lines():
            if line:
                yield line


@pytest.mark.parametrize("city", ["ams", "sin", "iad"])
@pytest.mark.parametrize(
    ("stream", "last"),
    [
        (chats, "length"),
        (completions, "length"),
        (responses, "response.incomplete"),
        (messages, "message_stop"),
        (runs, "data: [DONE]"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_is_read_to_its_end_and_its_engine_stops_if_the_client_leaves(
    fleet: Fleet, stream: Callable[[str, str, int], AsyncIterator[str]], last: str, city: str
) -> None:
    url = fleet.endpoint(city)
    events = [event async for event in stream(url, fleet.key, 4)]
    assert events[-1] == last
    endless: Any = stream(url, fleet.key, ENDLESS)
    async with aclosing(endless):
        for _ in range(5):
            await anext(endless)
        assert await requests_running(fleet) > 0
    await until_idle(fleet)


async def until_idle(fleet: Fleet) -> None:
    """Wait until the engines have stopped, for less time than they would go on."""

    async def is_idle() -> bool:
        return await requests_running(fleet) == 0

    await until("the engines stop", is_idle, timeout_s=10.0)


@node_sdks.needs_node
@pytest.mark.parametrize(
    ("script", "read", "expected"),
    [
        ("openai_sdk.cjs", lambda result: result["kinds"][-1], "response.incomplete"),
        ("anthropic_sdk.cjs", lambda result: result["kinds"][-1], "message_stop"),
        ("cloudflare_sdk.cjs", lambda result: result["answer"]["response"].split()[-1], "t3"),
        (
            "vercel_ai_sdk.mjs",
            lambda results: [answers["kinds"][-1] for answers in results.values()],
            ["finish"] * 4,
        ),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_streams_and_cancelled_streams_of_node(
    fleet: Fleet, script: str, read: Callable[[Any], Any], expected: Any
) -> None:
    result = await node_sdks.run(script, fleet.endpoint("iad"), key=fleet.key)
    assert read(result) == expected
    await until_idle(fleet)
