"""One node answers for the others of its PoP."""

import asyncio

import pytest

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.pop_loads import LoadsQuery, ProbedNode
from nodeagent.api import pop_loads
from nodeagent.api.pop_loads import REUSED_S, SILENT_FOR_S, PopLoadReader


class Pop:
    """The nodes of a PoP, their pings, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pings: list[NodeId] = []
        self.at_once = self.at_once_max = 0
        self.silent: set[NodeId] = set()
        self.two_asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.reader = PopLoadReader(self.ping, lambda: self.now_s)

    async def ping(self, node_id: NodeId, address: str) -> str:
        assert address == f"{node_id}:1"
        self.pings.append(node_id)
        if len(self.pings) == 2:
            self.two_asked.set()
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        await self.answers.wait()
        self.at_once -= 1
        if node_id in self.silent:
            raise TimeoutError
        return f"r-{node_id} p=1;d=2;r=1;w=0"

    async def read(self, *names: str) -> dict[str, float]:
        """Return the age of each node's load in ms."""
        nodes = tuple(ProbedNode(NodeId(name), f"{name}:1") for name in names)
        answer = await self.reader.read(LoadsQuery(nodes))
        assert all(node.loads.startswith(f"r-{node.node_id} ") for node in answer.nodes)
        return {node.node_id: node.age_ms for node in answer.nodes}


async def test_a_node_is_pinged_once_for_many_routers() -> None:
    pop = Pop()
    pop.answers.clear()
    queries = [asyncio.create_task(pop.read("a", "b")) for _ in range(50)]
    await pop.two_asked.wait()
    pop.answers.set()
    assert all([await query == {"a": 0.0, "b": 0.0} for query in queries])
    pop.now_s += REUSED_S / 2
    assert await pop.read("a") == {"a": pytest.approx(500 * REUSED_S)}
    assert sorted(pop.pings) == ["a", "b"]
    pop.now_s += REUSED_S
    assert await pop.read("a", "b") == {"a": 0.0, "b": 0.0}
    assert len(pop.pings) == 4


async def test_a_silent_node_is_left_out_and_not_asked_again_at_once() -> None:
    pop = Pop()
    pop.silent = {NodeId("b")}
    assert set(await pop.read("a", "b")) == {"a"}
    pop.now_s += SILENT_FOR_S - 0.01
    assert set(await pop.read("a", "b")) == {"a"}
    assert pop.pings.count(NodeId("b")) == 1
    pop.now_s += 0.02
    pop.silent = set()
    assert set(await pop.read("a", "b")) == {"a", "b"}


async def test_a_load_of_a_node_that_fell_silent_is_not_repeated() -> None:
    pop = Pop()
    assert set(await pop.read("a")) == {"a"}
    pop.silent = {NodeId("a")}
    pop.now_s += REUSED_S
    assert await pop.read("a") == {}
    assert await pop.read("a") == {}


async def test_few_nodes_are_pinged_at_once_over_all_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pop_loads, "PINGS_MAX", 2)
    pop = Pop()
    pop.answers.clear()
    queries = [asyncio.create_task(pop.read(*names)) for names in ("abc", "def")]
    await pop.two_asked.wait()
    pop.answers.set()
    assert [set(await query) for query in queries] == [set("abc"), set("def")]
    assert pop.at_once_max == 2


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pop_loads, "NODES_MAX", 10)
    pop = Pop()
    for number in range(100):
        await pop.read(f"n{number}")
    assert len(pop.reader._pongs) <= 11
    assert not pop.reader._reading
