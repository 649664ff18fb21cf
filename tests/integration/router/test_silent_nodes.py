"""Nodes that fall silent: which waiting requests are sent elsewhere, and which keep waiting."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from router.decide.admission.retry_budget import RetryBudget
from tests.chaos.cable import Cable, a_cable
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table

FOREVER_S = 30.0
"""Longer than a test may take."""


@asynccontextmanager
async def cabled(
    folder: Path, first: FakeNode, second: FakeNode
) -> AsyncIterator[tuple[Bench, Cable, Cable]]:
    """Run a router with two nodes behind cables; `first` is predicted to be the fastest."""
    timeouts: dict[str, Any] = {
        "first_byte_timeout_s": FOREVER_S,
        "stream_idle_timeout_s": FOREVER_S,
    }
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(a_bench(folder, 0, **timeouts))
        cables, routes = [], []
        for node, rate in ((first, 1e6), (second, 10.0)):
            await stack.enter_async_context(open_node(node))
            cable = await stack.enter_async_context(a_cable(node.port))
            cables.append(cable)
            node.port = cable.port
            routes.append(a_route(node, prefill_tokens_per_s=rate))
        bench.app.fleet.adopt(a_table(routes, generation=2))
        await bench.app.loops["probe"].wait_turns(2)
        yield bench, cables[0], cables[1]


async def answer(bench: Bench, **fields: Any) -> tuple[int, str, float]:
    """Send a request; return the status, the body and the seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(FOREVER_S / 2), bench.chat(**fields) as response:
        body = await response.text()
    return response.status, body, time.monotonic() - began


def failures_by_cause(bench: Bench) -> dict[str, float]:
    """Return the number of failed attempts, by cause."""
    samples = next(iter(bench.app.metrics.retries.collect())).samples
    return {s.labels["cause"]: s.value for s in samples if s.name.endswith("_total")}


async def test_requests_that_wait_for_a_lost_node_are_retried_within_seconds(
    tmp_path: Path,
) -> None:
    silent, healthy = FakeNode("silent"), FakeNode("healthy")
    async with cabled(tmp_path, silent, healthy) as (bench, cable, _):
        cable.hold()
        requests = [answer(bench), answer(bench, stream=True), answer(bench, stream=True)]
        for status, body, _ in await asyncio.gather(*requests):
            assert status == 200
            assert "t7" in body
        assert failures_by_cause(bench) == {"gone": 3}
        # Later requests do not use it.
        assert (await answer(bench))[0] == 200
        assert failures_by_cause(bench) == {"gone": 3}


async def test_a_stream_of_a_lost_node_continues_elsewhere(tmp_path: Path) -> None:
    silent, healthy = FakeNode("silent"), FakeNode("healthy")
    silent.itl_s, silent.tokens = 0.02, 40
    healthy.resumes = "greedy"
    async with cabled(tmp_path, silent, healthy) as (bench, cable, _):
        stream = asyncio.create_task(answer(bench, stream=True, temperature=0, max_tokens=40))
        await silent.until(lambda: silent.running)
        while silent.sent < 10:
            await asyncio.sleep(0.01)
        cable.hold()
        status, body, _ = await stream
        assert status == 200
        found = [f"t{n} " in body for n in range(40)]
        assert all(found), found


async def test_a_slow_node_that_answers_pings_keeps_its_requests(tmp_path: Path) -> None:
    slow, healthy = FakeNode("slow"), FakeNode("healthy")
    slow.ttft_s = 1.5
    async with cabled(tmp_path, slow, healthy) as (bench, _, _):
        for status, _, took_s in await asyncio.gather(answer(bench), answer(bench, stream=True)):
            assert status == 200
            assert took_s > 1.4
        assert (slow.requests, healthy.requests) == (2, 0)


async def test_if_all_nodes_are_silent_the_router_is_cut_off_and_requests_wait(
    tmp_path: Path,
) -> None:
    nodes = FakeNode("one"), FakeNode("other")
    async with cabled(tmp_path, *nodes) as (bench, one, other):
        one.hold()
        other.hold()
        stream = asyncio.create_task(answer(bench, stream=True))
        await bench.app.loops["probe"].wait_turns(3)
        assert bench.app.loops["probe"].last_result == (0, 2)
        one.let_go()
        other.let_go()
        assert (await stream)[0] == 200
        assert (nodes[0].requests, nodes[1].requests) == (1, 0)


async def test_only_as_many_requests_as_the_retry_budget_allows_leave_a_lost_node(
    tmp_path: Path,
) -> None:
    silent, healthy = FakeNode("silent"), FakeNode("healthy")
    async with cabled(tmp_path, silent, healthy) as (bench, cable, _):
        cable.hold()
        began_s = time.monotonic()
        waiting = [asyncio.create_task(answer(bench)) for _ in range(40)]
        async with asyncio.timeout(FOREVER_S / 2):
            while sum(task.done() for task in waiting) < 10:
                await asyncio.sleep(0.02)
        await bench.app.loops["probe"].wait_turns(2)
        # A fifth of 40 requests and a reserve of 10, again and again over each window.
        windows = (time.monotonic() - began_s) / RetryBudget.WINDOW_S
        assert 10 <= healthy.requests <= (0.2 * 40 + 10) * (1 + windows)
        cable.let_go()
        ended = Counter(status for status, _, _ in await asyncio.gather(*waiting))
        assert ended == {200: 40}


async def test_if_only_pings_fail_at_every_node_all_nodes_are_used(tmp_path: Path) -> None:
    """A fault of the probes, not of the nodes, must leave nobody without replicas (N7)."""
    nodes = FakeNode("one"), FakeNode("other")
    async with cabled(tmp_path, *nodes) as (bench, _, _):
        for node in nodes:
            node.ping_s = FOREVER_S
        await bench.app.loops["probe"].wait_turns(3)
        assert bench.app.loops["probe"].last_result == (0, 2)
        statuses = [(await answer(bench))[0] for _ in range(5)]
        nodes[0].refuse = "busy"
        statuses += [(await answer(bench, stream=True))[0] for _ in range(5)]
        assert statuses == [200] * 10
        assert (nodes[0].running, nodes[1].requests) == (0, 5)
