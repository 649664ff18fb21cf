"""Nodes that fall silent under what waits for them: who is let go, and who is left to wait."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.chaos.cable import Cable, a_cable
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table

FOR_EVER_S = 30.0
"""What waits so long fails the test."""


@asynccontextmanager
async def cabled(
    folder: Path, first: FakeNode, second: FakeNode
) -> AsyncIterator[tuple[Bench, Cable, Cable]]:
    """Run a router before two nodes, each behind a cable; by prediction `first` is the best."""
    patience: dict[str, Any] = {
        "first_byte_timeout_s": FOR_EVER_S,
        "stream_idle_timeout_s": FOR_EVER_S,
    }
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(a_bench(folder, 0, **patience))
        cables, routes = [], []
        for node, rate in ((first, 1e6), (second, 10.0)):
            await stack.enter_async_context(open_node(node))
            cable = await stack.enter_async_context(a_cable(node.port))
            cables.append(cable)
            node.port = cable.port
            routes.append(a_route(node, prefill_tokens_per_s=rate))
        bench.house.fleet.adopt(a_table(routes, generation=2))
        await bench.house.loops["probe"].wait_turns(2)
        yield bench, cables[0], cables[1]


async def answer(bench: Bench, **fields: Any) -> tuple[int, str, float]:
    """Ask once; return the status, the body, and how long it took: less than a silence may last."""
    began = time.monotonic()
    async with asyncio.timeout(FOR_EVER_S / 2), bench.chat(**fields) as response:
        body = await response.text()
    return response.status, body, time.monotonic() - began


def retried(bench: Bench) -> dict[str, float]:
    """Return how many attempts failed, by cause."""
    samples = next(iter(bench.house.metrics.retries.collect())).samples
    return {s.labels["cause"]: s.value for s in samples if s.name.endswith("_total")}


async def test_who_waits_for_a_first_token_is_let_go_within_seconds(tmp_path: Path) -> None:
    mute, well = FakeNode("mute"), FakeNode("well")
    async with cabled(tmp_path, mute, well) as (bench, cable, _):
        cable.hold()
        asked = [answer(bench), answer(bench, stream=True), answer(bench, stream=True)]
        for status, body, _ in await asyncio.gather(*asked):
            assert status == 200
            assert "t7" in body
        assert retried(bench) == {"gone": 3}
        # Whoever comes next does not try it.
        assert (await answer(bench))[0] == 200
        assert retried(bench) == {"gone": 3}


async def test_a_stream_goes_on_elsewhere(tmp_path: Path) -> None:
    mute, well = FakeNode("mute"), FakeNode("well")
    mute.itl_s, mute.tokens = 0.02, 40
    well.resumes = "greedy"
    async with cabled(tmp_path, mute, well) as (bench, cable, _):
        asked = asyncio.create_task(answer(bench, stream=True, temperature=0, max_tokens=40))
        await mute.until(lambda: mute.running)
        while mute.sent < 10:
            await asyncio.sleep(0.01)
        cable.hold()
        status, body, _ = await asked
        assert status == 200
        said = [f"t{n} " in body for n in range(40)]
        assert all(said), said


async def test_a_node_that_is_slow_and_lives_keeps_its_requests(tmp_path: Path) -> None:
    slow, well = FakeNode("slow"), FakeNode("well")
    slow.ttft_s = 1.5
    async with cabled(tmp_path, slow, well) as (bench, _, _):
        for status, _, took_s in await asyncio.gather(answer(bench), answer(bench, stream=True)):
            assert status == 200
            assert took_s > 1.4
        assert (slow.asked, well.asked) == (2, 0)


async def test_where_all_are_silent_it_is_the_router_and_everybody_waits(tmp_path: Path) -> None:
    nodes = FakeNode("one"), FakeNode("other")
    async with cabled(tmp_path, *nodes) as (bench, one, other):
        one.hold()
        other.hold()
        asked = asyncio.create_task(answer(bench, stream=True))
        await bench.house.loops["probe"].wait_turns(3)
        assert bench.house.loops["probe"].last_result == (0, 2)
        one.let_go()
        other.let_go()
        assert (await asked)[0] == 200
        assert (nodes[0].asked, nodes[1].asked) == (1, 0)


async def test_as_many_are_let_go_as_may_be_retried_and_the_rest_waits(tmp_path: Path) -> None:
    mute, well = FakeNode("mute"), FakeNode("well")
    async with cabled(tmp_path, mute, well) as (bench, cable, _):
        cable.hold()
        waiting = [asyncio.create_task(answer(bench)) for _ in range(40)]
        async with asyncio.timeout(FOR_EVER_S / 2):
            while sum(task.done() for task in waiting) < 10:
                await asyncio.sleep(0.02)
        await bench.house.loops["probe"].wait_turns(2)
        # A fifth of forty, and ten besides.
        assert 10 <= well.asked <= 20
        cable.let_go()
        ended = Counter(status for status, _, _ in await asyncio.gather(*waiting))
        assert ended == {200: 40}
