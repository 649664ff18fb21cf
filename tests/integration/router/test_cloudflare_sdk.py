"""The official `cloudflare` client, unmodified, with the router."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cloudflare import AsyncCloudflare, NotFoundError
from yarl import URL

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench, a_route, a_table

MODEL = "@cf/meta/tiny:8b"


@asynccontextmanager
async def a_client(bench: Bench) -> AsyncIterator[AsyncCloudflare]:
    bench.app.fleet.adopt(a_table([a_route(bench.nodes[0])], generation=2, names=(MODEL,)))
    async with AsyncCloudflare(
        base_url=f"{bench.url}/client/v4", api_token=KEY, max_retries=0
    ) as client:
        yield client


async def test_a_model_with_slashes_runs(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        answer: Any = await client.ai.run(MODEL, account_id="acme", prompt="hi", max_tokens=3)
        assert answer["response"] == "t0 t1 t2"
        assert json.loads(bench.nodes[0].bodies[0])["model"] == MODEL
        with pytest.raises(NotFoundError) as missing:
            await client.ai.run("@cf/meta/none", account_id="acme", prompt="hi")
        assert missing.value.errors[0].code == 3042


async def test_a_stream_is_read_to_its_end_and_ends_with_its_client(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.005
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        streamed = client.ai.with_streaming_response
        request: Any = {"account_id": "acme", "prompt": "hi", "stream": True}
        async with streamed.run(MODEL, **request, max_tokens=3) as answer:
            lines = [line async for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(event["response"] for event in events).split() == ["t0", "t1", "t2"]
        assert events[-1]["usage"]["completion_tokens"] == 3
        async with streamed.run(MODEL, **request, max_tokens=4000) as answer:
            await anext(answer.iter_lines())
        await node.until(lambda: node.cancelled == 1)


@pytest.mark.parametrize("model", [MODEL, "@cf%2Fmeta%2Ftiny%3A8b", "%40cf/meta/tiny:8b"])
async def test_a_model_in_a_path_may_be_encoded_or_not(tmp_path: Path, model: str) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench):
        path = f"{bench.url}/client/v4/accounts/acme/ai/run/{model}"
        async with bench.http.post(URL(path, encoded=True), json={"prompt": "hi"}) as response:
            assert response.status == 200
        listed = URL(f"{bench.url}/v1/models/{model}", encoded=True)
        async with bench.http.get(listed) as response:
            assert (await response.json())["id"] == MODEL
