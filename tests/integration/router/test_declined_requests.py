"""A request that an engine declines: one attempt, a 400, nothing counted against the replica."""

import asyncio
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from msgspec.structs import replace

from isochrone.wire.peers.routes import RolloutEntry
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table
from tests.integration.router.test_media import SOUND
from tests.integration.router.test_serving import frames, until_idle, words
from tests.integration.router.test_unhealthy_replicas import counted

REQUESTS = 6


def use_rollout(bench: Bench, kind: str = "chat") -> None:
    """Count every request as a trial of the new version."""
    table = a_table([a_route(node) for node in bench.nodes], generation=2)
    rollout = RolloutEntry(version=1, share=1.0)
    entry = replace(table.deployments[0], rollout=rollout, kind=kind)
    bench.app.fleet.adopt(replace(table, deployments=(entry,)))


async def check_nothing_counted(bench: Bench) -> None:
    await until_idle(bench)
    assert sum(node.requests for node in bench.nodes) == REQUESTS, "no request is tried twice"
    assert await counted(bench, "ejected_replicas") == 0
    assert bench.app.recorder.trials.take() == ()
    assert bench.app.recorder.take_demand() == ()


@pytest.mark.parametrize("code", ["invalid_request", 400, 422])
async def test_an_error_event_before_the_first_token_is_a_400(
    tmp_path: Path, code: str | int
) -> None:
    async with a_bench(tmp_path, 2, demand_interval_s=3600) as bench:
        use_rollout(bench)
        for node in bench.nodes:
            node.error_at, node.error_code = 0, code
        for _ in range(REQUESTS):
            async with asyncio.timeout(30), bench.chat(stream=True) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"] == "engine died"
        await check_nothing_counted(bench)


async def test_an_error_event_after_tokens_ends_the_stream(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 2, demand_interval_s=3600) as bench:
        use_rollout(bench)
        for node in bench.nodes:
            node.error_at, node.error_code, node.resumes = 3, "invalid_request", "seeded"
        for _ in range(REQUESTS):
            async with asyncio.timeout(30), bench.chat(stream=True) as response:
                events: list[Any] = frames(await response.text())
            assert words(events[:-1]) == "t0 t1 t2 "
            assert events[-1]["error"]["code"] == "invalid_request"
        await check_nothing_counted(bench)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_response_that_blames_the_request_is_a_400(tmp_path: Path, status: int) -> None:
    nodes = [FakeNode("n1"), FakeNode("n2")]
    async with a_bench(tmp_path, nodes, demand_interval_s=3600) as bench:
        use_rollout(bench)
        for node in nodes:
            node.status = status
        for _ in range(REQUESTS):
            async with asyncio.timeout(30), bench.chat() as response:
                assert response.status == 400
        await check_nothing_counted(bench)


JSON_REQUESTS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("chat", "/v1/completions", {"prompt": "hi"}),
    ("chat", "/v1/responses", {"input": "hi", "store": False}),
    ("chat", "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
    ("chat", "/ai/run/tiny", {"prompt": "hi"}),
    ("embedding", "/v1/embeddings", {"input": "hi"}),
    ("embedding", "/ai/run/tiny", {"text": "hi"}),
    ("rerank", "/v1/rerank", {"query": "hi", "documents": ["a", "b"]}),
    ("speech", "/v1/audio/speech", {"input": "hi", "voice": "alloy"}),
    ("image", "/v1/images/generations", {"prompt": "hi"}),
)


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        *JSON_REQUESTS,
        *((kind, path, {**body, "stream": True}) for kind, path, body in JSON_REQUESTS[:4]),
        ("transcription", "/v1/audio/transcriptions", {}),
    ],
)
async def test_a_response_that_blames_the_request_is_a_400_on_every_path(
    tmp_path: Path, kind: str, path: str, body: dict[str, Any], status: int
) -> None:
    nodes = [FakeNode("n1"), FakeNode("n2")]
    async with a_bench(tmp_path, nodes, demand_interval_s=3600) as bench:
        use_rollout(bench, kind)
        for node in nodes:
            node.status = status
        for _ in range(REQUESTS):
            content: dict[str, Any] = {"json": {"model": "tiny", **body}}
            if kind == "transcription":
                content = {"data": a_sound()}
            url = f"{bench.url}{path}"
            async with asyncio.timeout(30), bench.http.post(url, **content) as response:
                assert (response.status, "broken" in await response.text()) == (400, True)
        await until_idle(bench)
        assert sum(node.errors for node in nodes) == REQUESTS, "no request is tried twice"
        assert await counted(bench, "ejected_replicas") == 0
        assert bench.app.recorder.trials.take() == ()
        assert bench.app.recorder.take_demand() == ()


def a_sound() -> aiohttp.FormData:
    form = aiohttp.FormData({"model": "tiny"})
    form.add_field("file", SOUND, filename="a.wav", content_type="audio/wav")
    return form
