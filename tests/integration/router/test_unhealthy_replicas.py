"""Failing replicas: when they are ejected, tried again, and used as the last resort."""

import asyncio
from collections import Counter
from pathlib import Path

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table


async def counted(bench: Bench, name: str, **labels: str) -> float:
    """Read a metric."""
    bench.app.loops["gauges"].nudge()
    await bench.app.loops["gauges"].wait_turns(1)
    registry = bench.app.metrics.registry
    return registry.get_sample_value(f"isochrone_router_{name}", labels) or 0.0


async def statuses(bench: Bench, count: int) -> Counter[int]:
    """Ask so many times, one after the other."""
    ended: Counter[int] = Counter()
    for _ in range(count):
        async with bench.chat() as response:
            await response.read()
            ended[response.status] += 1
    return ended


async def test_clients_get_answers_while_most_replicas_are_dead(tmp_path: Path) -> None:
    nodes = [FakeNode(f"n{n}") for n in range(3)]
    async with a_bench(tmp_path, nodes, connect_timeout_s=0.5) as bench:
        # Two of them refuse connections, and are predicted to be the fastest by far.
        nodes[0].port = nodes[1].port = 9
        dead = [a_route(node, prefill_tokens_per_s=1e6) for node in nodes[:2]]
        table = a_table([*dead, a_route(nodes[2], prefill_tokens_per_s=10.0)], generation=2)
        bench.app.fleet.adopt(table)
        assert await statuses(bench, 40) == {200: 40}
        assert await counted(bench, "ejections_total", cause="consecutive") == 2
        assert await counted(bench, "panicking_deployments") == 1
        # With two of three unhealthy none is excluded, and still only the healthy one is used.
        assert await counted(bench, "retries_total", cause="unreachable") == 6


async def test_replicas_that_recover_together_serve_again_at_once(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 4) as bench:
        for node in bench.nodes:
            node.status = 503
        assert set(await statuses(bench, 12)) == {502}
        assert await counted(bench, "ejected_replicas") == 4
        for node in bench.nodes:
            node.status = 200
        assert await statuses(bench, 12) == {200: 12}


async def test_a_replica_that_fails_every_second_request_is_ejected(tmp_path: Path) -> None:
    class Flaky(FakeNode):
        """Fails every second request."""

        async def _answer(self, request, body):  # type: ignore[no-untyped-def]
            self.status = 503 if self.requests % 2 else 200
            return await super()._answer(request, body)

    nodes = [Flaky("bad"), FakeNode("good"), FakeNode("also")]
    async with a_bench(tmp_path, nodes) as bench:
        best = a_route(nodes[0], prefill_tokens_per_s=1e6)
        rest = [a_route(node, prefill_tokens_per_s=100.0) for node in nodes[1:]]
        bench.app.fleet.adopt(a_table([best, *rest], generation=2))
        assert await statuses(bench, 30) == {200: 30}
        assert await counted(bench, "ejections_total", cause="ratio") == 1
        assert nodes[0].requests < 20


async def test_a_single_request_tries_an_ejected_replica(tmp_path: Path) -> None:
    nodes = [FakeNode("bad"), FakeNode("good")]
    async with a_bench(tmp_path, nodes, first_byte_timeout_s=5.0) as bench:
        best = a_route(nodes[0], prefill_tokens_per_s=1e6)
        bench.app.fleet.adopt(
            a_table([best, a_route(nodes[1], prefill_tokens_per_s=10.0)], generation=2)
        )
        nodes[0].status = 503
        assert await statuses(bench, 4) == {200: 4}
        requests_before = nodes[0].requests
        assert requests_before == 3
        nodes[0].status, nodes[0].ttft_s = 200, 0.5
        async with asyncio.timeout(30):
            while nodes[0].requests == requests_before:
                await asyncio.gather(*(statuses(bench, 1) for _ in range(4)))
        # Of four concurrent requests one was the trial.
        assert nodes[0].requests == requests_before + 1
        async with asyncio.timeout(30):
            while await counted(bench, "ejected_replicas"):
                await asyncio.sleep(0)
        # Once healthy, the replica takes a growing share.
        async with asyncio.timeout(30):
            while nodes[0].requests == requests_before + 1:
                await statuses(bench, 1)
