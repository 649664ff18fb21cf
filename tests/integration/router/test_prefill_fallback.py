"""Prefill replicas answer requests while no other replica of their deployment can."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import RolloutEntry
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table

STREAM: dict[str, Any] = {"stream": True, "max_tokens": 8, "temperature": 0}


@asynccontextmanager
async def roles(folder: Path, **entry: Any) -> AsyncIterator[tuple[Bench, FakeNode, FakeNode]]:
    """Run a router with a replica that generates, and one that reads prompts."""
    decode, prefill = FakeNode("d"), FakeNode("p")
    decode.resumes = prefill.resumes = "greedy"
    async with a_bench(folder, [decode, prefill]) as bench:
        routes = [a_route(decode, role=Role.DECODE), a_route(prefill, role=Role.PREFILL)]
        table = a_table(routes, generation=2)
        deployments = tuple(replace(one, **entry) for one in table.deployments)
        bench.app.follower.accept(replace(table, deployments=deployments))
        yield bench, decode, prefill


async def text(bench: Bench) -> str:
    async with bench.chat(**STREAM) as response:
        assert response.status == 200, await response.text()
        return str(await response.text())


async def test_a_prefill_replica_answers_after_the_only_other_replica_is_lost(
    tmp_path: Path,
) -> None:
    async with roles(tmp_path) as (bench, decode, prefill):
        await text(bench)
        assert (decode.requests, prefill.requests) == (1, 0)
        decode.cut_at = 3
        assert re.findall(r"\bt\d\b", await text(bench)) == [f"t{n}" for n in range(8)]
        assert (decode.requests, prefill.requests) == (2, 1)
        # Each of them is answered: the first ones after a failed attempt, the others at once.
        decode.status = 500
        for _ in range(12):
            assert "[DONE]" in await text(bench)
        assert prefill.requests == 13
        assert decode.requests < 14
        # Once it answers again, requests return to it.
        decode.status, failed = 200, decode.requests
        async with asyncio.timeout(60):
            while decode.requests == failed:
                await text(bench)


async def test_a_full_replica_is_waited_for(tmp_path: Path) -> None:
    async with roles(tmp_path) as (bench, decode, prefill):
        decode.refuse = "tokens"
        async with bench.chat(**STREAM) as response:
            assert response.status == 429
        assert prefill.requests == 0


async def test_an_engine_that_only_reads_prompts_answers_nothing(tmp_path: Path) -> None:
    async with roles(tmp_path, needs_prefill=True) as (bench, decode, prefill):
        decode.status = 500
        async with bench.chat(**STREAM) as response:
            assert response.status >= 500
        assert prefill.requests == 0


async def test_a_canary_without_a_generating_replica_left_uses_the_old_version_first(
    tmp_path: Path,
) -> None:
    new_decode, new_prefill, old = FakeNode("d2"), FakeNode("p2"), FakeNode("d1")
    async with a_bench(tmp_path, [new_decode, new_prefill, old]) as bench:
        routes = [
            replace(a_route(new_decode, role=Role.DECODE), version=2),
            replace(a_route(new_prefill, role=Role.PREFILL), version=2),
            a_route(old, role=Role.DECODE),
        ]
        table = a_table(routes, generation=2)
        rollout = RolloutEntry(version=2, share=1.0)
        deployments = tuple(replace(one, rollout=rollout) for one in table.deployments)
        bench.app.follower.accept(replace(table, deployments=deployments))
        new_decode.status = 500
        assert "[DONE]" in await text(bench)
        assert (new_decode.requests, new_prefill.requests, old.requests) == (1, 0, 1)
