"""The official `openai` client, unmodified, with the router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.ids import KeyId
from isochrone.wire.peers.routes import KeyLimits
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


async def test_models_are_listed_and_retrieved(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        model = (await client.models.retrieve("tiny")).to_dict()
        assert (model["id"], model["kind"], model["context_window"]) == ("tiny", "chat", 4096)
        assert model["price"] is None
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("org/none")
        assert caught.value.code == "model_not_found"


async def test_chats_and_completions_are_answered(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
        assert answer.choices[0].message.content == "t0 t1 t2"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        await client.completions.create(model="tiny", prompt="hello", max_tokens=3)
        await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=3)
        assert bench.nodes[0].requests == 3


@pytest.mark.parametrize("asks", [True, False])
async def test_a_stream_has_its_usage_only_if_asked_for(tmp_path: Path, asks: bool) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks else {}
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, max_tokens=4, **options
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "t0 t1 t2 t3 "
        usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert [usage.completion_tokens for usage in usages] == ([4] if asks else [])


async def test_errors_raise_the_sdks_own_exceptions(tmp_path: Path) -> None:
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
                openai.NotFoundError, match=r"/v1/fine_tuning/jobs: .* the routes are POST /v1/"
            ) as not_found:
                await client.fine_tuning.jobs.list()
            assert not_found.value.code == "not_found"
            with pytest.raises(
                openai.NotFoundError, match=r"there is /v1/models; correct the base"
            ):
                await client.with_options(base_url=bench.url).models.list()
            for _ in range(3):
                await chat.create(model="tiny", messages=HELLO)
            with pytest.raises(openai.RateLimitError) as limited:
                await chat.create(model="tiny", messages=HELLO)
            assert limited.value.code == "rate_limit_exceeded"
            assert int(limited.value.response.headers["retry-after"]) >= 1


async def test_revoked_expired_and_restricted_keys_are_refused(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        routes = [a_route(bench.nodes[0])]
        other = a_key(format_key(KeyId("o" * 12), b"\x03" * 32))
        chat = client.chat.completions
        await chat.create(model="tiny", messages=HELLO)
        for number, key in enumerate([a_key(expires_at=1.0), other], 2):
            bench.app.fleet.adopt(a_table(routes, generation=number, keys=[key]))
            with pytest.raises(openai.AuthenticationError):
                await chat.create(model="tiny", messages=HELLO)
        restricted = a_key(deployments=("else",))
        bench.app.fleet.adopt(a_table(routes, generation=4, keys=[restricted]))
        with pytest.raises(openai.NotFoundError, match=r"for this key .*: none"):
            await chat.create(model="tiny", messages=HELLO)
        assert [model.id async for model in client.models.list()] == []


async def test_a_session_and_a_flexible_request_reach_the_node(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 4) as bench, a_client(bench) as client:
        raw: Any = client.chat.completions.with_raw_response.create

        async def node_of(**fields: Any) -> str:
            answer = await raw(model="tiny", messages=HELLO, max_tokens=1, **fields)
            return str(answer.headers["x-isochrone-node"])

        named = {await node_of(prompt_cache_key="chat 1" * 40) for _ in range(6)}
        header = {
            await node_of(extra_headers={"x-session-affinity": "s"}, service_tier="flex")
            for _ in range(6)
        }
        assert (len(named), len(header)) == (1, 1)
        sent = {
            (got.get("x-session-affinity"), got.get("x-isochrone-priority"))
            for node in bench.nodes
            for got in node.request_headers
        }
        assert sent == {(None, None), ("s", "0")}
        await node_of(service_tier="flex", extra_headers={"x-isochrone-priority": "9"})
        with pytest.raises(openai.BadRequestError, match="service_tier"):
            await node_of(service_tier="priority")


async def test_a_broken_stream_raises(tmp_path: Path) -> None:
    node = FakeNode()
    node.cut_at = 3
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError):
            [chunk async for chunk in stream]


async def test_closing_a_stream_frees_the_node(tmp_path: Path) -> None:
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


async def test_a_tenants_budget_limits_all_of_its_keys(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        second = format_key(KeyId("o" * 12), b"\x03" * 32)
        budget = msgspec.structs.replace(
            a_key(limits=KeyLimits(requests_per_min=2)),
            key_id=budget_id("acme"),
            secret_sha256="",
        )
        keys = [a_key(), a_key(second), budget]
        bench.app.fleet.adopt(a_table([a_route(bench.nodes[0])], generation=2, keys=keys))
        for key in (KEY, second):
            async with a_client(bench, key) as client:
                await client.chat.completions.create(model="tiny", messages=HELLO)
        async with a_client(bench, second) as client:
            with pytest.raises(openai.RateLimitError, match="the tenant's limit"):
                await client.chat.completions.create(model="tiny", messages=HELLO)
