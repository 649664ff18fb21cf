"""In a large fleet one node of a PoP answers for the others."""

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from isochrone.wire import codec
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.peers.pop_loads import LoadsQuery, NodeLoads, PopLoads
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.api.pop_loads import PopLoadReader
from router import build
from router.decide.liveness import probe_plan
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench

pytestmark = pytest.mark.skipif(
    build.is_compiled(), reason="compiled code has its limits built in; runs interpreted"
)
LOAD = "p=700;d=40;r=2;w=0;u=700;o=700;e=40"


@pytest.fixture(autouse=True)
def is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any fleet is large, and no node is pinged merely because it is its turn."""
    monkeypatch.setattr(probe_plan, "PING_ALL_NODES_MAX", 1)
    monkeypatch.setattr(probe_plan, "_in_turn", lambda *_: set[NodeId]())


@asynccontextmanager
async def a_pop(folder: Path, given: Sequence[FakeNode] = ()) -> AsyncIterator[Bench]:
    """A router and nodes that all can answer for their PoP."""
    nodes = given or [FakeNode(f"n{number}") for number in range(4)]
    async with AsyncExitStack() as stack:
        for node in nodes:
            client = PeerReplicaClient(None, time.monotonic)
            stack.push_async_callback(client.close)
            node.loads_reader = PopLoadReader(client.read_loads, time.monotonic)
            node.loads = f"r-{node.name} {LOAD}"
        yield await stack.enter_async_context(a_bench(folder, nodes))


def known_loads(bench: Bench) -> list[int]:
    ledger, now_s = bench.app.fleet.in_flight, bench.app.fleet.clock()
    names = [ReplicaId(f"r-{node.name}") for node in bench.nodes]
    return [ledger.tokens_at(name, now_s).others_decode_tokens for name in names]


def asked(nodes: Sequence[FakeNode]) -> list[FakeNode]:
    return [node for node in nodes if node.pop_queries]


async def until(bench: Bench, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        await bench.app.loops["probe"].wait_turns(1)
    raise AssertionError("never so")


async def test_all_loads_are_known_by_asking_one_node(tmp_path: Path) -> None:
    async with a_pop(tmp_path) as bench:
        await until(bench, lambda: known_loads(bench) == [40] * 4)
        (answerer,) = asked(bench.nodes)
        queries, pings = answerer.pop_queries, sum(node.pings for node in bench.nodes)
        await bench.app.loops["probe"].wait_turns(10)
        assert answerer.pop_queries >= queries + 10
        # Pings come from the PoP, and no more often than loads are reused.
        assert sum(node.pings for node in bench.nodes) - pings < 4 * 10


async def test_another_node_answers_if_the_first_does_not(tmp_path: Path) -> None:
    async with a_pop(tmp_path) as bench:
        await until(bench, lambda: known_loads(bench) == [40] * 4)
        (first,) = asked(bench.nodes)
        # An older release, which answers 404.
        first.loads_reader = None
        for node in bench.nodes:
            node.loads = node.loads.replace("e=40", "e=60")
        await until(bench, lambda: known_loads(bench) == [60] * 4)
        assert len(asked(bench.nodes)) >= 2
        assert bench.app.metrics.pop_loads_failures._value.get() >= 1


class TwiceNaming(FakeNode):
    """Names each node of its PoP twice: first with a time of the lie's, then with a real one."""

    age_ms = 0.0
    lies = 0

    async def pop_loads(self, request: web.Request) -> web.Response:
        """Answer with the lie for as long as `loads_reader` is not used."""
        if not self.age_ms:
            return await super().pop_loads(request)
        query = codec.decode(await request.read(), codec.decoder(LoadsQuery))
        nodes = [
            NodeLoads(node.node_id, age_ms, 1.0, f"r-{node.node_id} {LOAD.replace('e=40', 'e=9')}")
            for node in query.nodes
            for age_ms in (self.age_ms, 1.0)
        ]
        self.lies += 1
        return web.Response(body=codec.encode(PopLoads(tuple(nodes))))


@pytest.mark.parametrize("age_ms", [math.nan, math.inf, -1e12])
async def test_no_lie_about_other_nodes_outlasts_the_next_honest_answer(
    tmp_path: Path, age_ms: float
) -> None:
    nodes = [TwiceNaming(f"n{number}") for number in range(4)]
    for node in nodes:
        node.age_ms = age_ms
    async with a_pop(tmp_path, nodes) as bench:
        await until(bench, lambda: any(node.lies > 2 for node in nodes))
        for node in nodes:
            node.age_ms = 0.0
        await until(bench, lambda: known_loads(bench) == [40] * 4)


async def test_nodes_are_pinged_where_none_can_answer(tmp_path: Path) -> None:
    async with a_pop(tmp_path) as bench:
        for node in bench.nodes:
            node.loads_reader = None
        await until(bench, lambda: known_loads(bench) == [40] * 4)


async def test_a_node_that_its_pop_cannot_reach_is_pinged_by_the_router(tmp_path: Path) -> None:
    async with a_pop(tmp_path) as bench:
        await until(bench, lambda: known_loads(bench) == [40] * 4)
        (answerer,) = asked(bench.nodes)
        slow = next(node for node in bench.nodes if node is not answerer)
        # Too slow for its peers, and fast enough for the router.
        patience_s = bench.app.prober._timeout_s = 30.0
        slow.ping_s = 1.0
        slow.loads = slow.loads.replace("e=40", "e=90")
        assert patience_s > slow.ping_s
        await until(bench, lambda: 90 in known_loads(bench))
