"""The official `openai` client, unmodified, against the router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from isochrone.wire.ids import KeyId
from isochrone.wire.keys import format_key
from isochrone.wire.routes import KeyLimits
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench, a_key, a_route, a_table

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def a_client(bench: Bench, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{bench.url}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client


async def test_list_and_retrieve(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("org/none")
        assert caught.value.code == "model_not_found"


async def test_chat_and_completion(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
        assert answer.choices[0].message.content == "t0 t1 t2"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        await client.completions.create(model="tiny", prompt="hello", max_tokens=3)
        await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=3)
        assert bench.nodes[0].asked == 3


@pytest.mark.parametrize("asks", [True, False])
async def test_stream_with_and_without_usage(tmp_path: Path, asks: bool) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks else {}
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, max_tokens=4, **options
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "t0 t1 t2 t3 "
        told = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert [usage.completion_tokens for usage in told] == ([4] if asks else [])


async def test_errors_are_the_sdks_own(tmp_path: Path) -> None:
    async with a_bench(tmp_path, limits=KeyLimits(requests_per_min=3)) as bench:
        unknown = format_key(KeyId("z" * 12), b"\x02" * 32)
        for key in ("", "sk-garbled", KEY[:20] + "x" + KEY[21:], unknown):
            async with a_client(bench, key or "x") as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await client.chat.completions.create(model="tiny", messages=HELLO)
                assert refused.value.code == "invalid_api_key"
        async with a_client(bench) as client:
            chat = client.chat.completions
            with pytest.raises(openai.NotFoundError, match=r"for this key .*: tiny") as missing:
                await chat.create(model="none", messages=HELLO)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as wrong:
                await chat.create(model="tiny", messages=HELLO, max_tokens=-1)
            assert wrong.value.param == "max_tokens"
            with pytest.raises(
                openai.NotFoundError, match=r"/audio/speech; there are POST /v1/"
            ) as elsewhere:
                await client.audio.speech.create(model="tiny", voice="any", input="hello")
            assert elsewhere.value.code == "not_found"
            for _ in range(3):
                await chat.create(model="tiny", messages=HELLO)
            with pytest.raises(openai.RateLimitError) as limited:
                await chat.create(model="tiny", messages=HELLO)
            assert limited.value.code == "rate_limit_exceeded"
            assert int(limited.value.response.headers["retry-after"]) >= 1


async def test_revoked_expired_and_narrowed_keys(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        routes = [a_route(bench.nodes[0])]
        other = a_key(format_key(KeyId("o" * 12), b"\x03" * 32))
        chat = client.chat.completions
        await chat.create(model="tiny", messages=HELLO)
        for number, key in enumerate([a_key(expires_at=1.0), other], 2):
            bench.house.fleet.adopt(a_table(routes, generation=number, keys=[key]))
            with pytest.raises(openai.AuthenticationError):
                await chat.create(model="tiny", messages=HELLO)
        narrowed = a_key(deployments=("else",))
        bench.house.fleet.adopt(a_table(routes, generation=4, keys=[narrowed]))
        with pytest.raises(openai.NotFoundError, match=r"for this key .*: none"):
            await chat.create(model="tiny", messages=HELLO)
        assert [model.id async for model in client.models.list()] == []


async def test_a_broken_stream_raises_and_is_not_taken_for_whole(tmp_path: Path) -> None:
    node = FakeNode()
    node.cut_at = 3
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError):
            [chunk async for chunk in stream]


async def test_cancel_mid_stream_frees_the_node(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.02
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, max_tokens=10_000
        )
        async for _ in stream:
            break
        await stream.close()
        await node.until(lambda: node.cancelled == 1)
