"""Asking one node of each group for the loads of all: nodes that answer at once or never."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from isochrone.wire import codec
from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.pop_loads import LoadsQuery, NodeLoads, PopLoads
from isochrone.wire.peers.routes import RouteTable
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.decide.attempt import FailureCause
from router.decide.liveness.probe_plan import PING_ALL_NODES_MAX
from router.fleet_state import FleetState
from router.loops.read_pop_loads import PopLoadPoller
from router.recording.metrics import Metrics
from tests.unit.router.test_follow_routes import a_table
from tests.unit.router.test_probe_nodes import NextTurn

NODES = "".join(chr(0x4E00 + number) for number in range(PING_ALL_NODES_MAX + 64))
QUERY = codec.decoder(LoadsQuery)


class Nodes:
    """Nodes that answer for their group, but one group's."""

    def __init__(self) -> None:
        self.hanging: NodeId | None = None
        """A node of a group that no node answers for."""
        self.asked: Counter[NodeId] = Counter()
        """By the first node of a group."""
        self.let_go = asyncio.Event()

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    async def fetch(self, node_id: NodeId, address: str, request: NodeRequest, *_: object) -> Any:
        query: LoadsQuery = codec.decode(request.body, QUERY)
        members = [node.node_id for node in query.nodes]
        self.asked[members[0]] += 1
        if self.hanging in members:
            await self.let_go.wait()
            raise AttemptFailed(FailureCause.GONE, "it went")
        answer = PopLoads(tuple(NodeLoads(member, 1.0, 1.0, "") for member in members))
        head = SimpleNamespace(status=200)
        return SimpleNamespace(body=codec.encode(answer), response_head=lambda: head)


def a_poller(nodes: Nodes, table: RouteTable) -> PopLoadPoller:
    fleet = FleetState(PopId("ams"), nodes.clock, "boot")
    fleet.adopt(table)
    return PopLoadPoller(
        fleet=fleet,
        upstream=cast(Any, nodes),
        metrics=Metrics(),
        timeout_s=60.0,
        interval_s=0.01,
    )


async def test_a_node_that_does_not_answer_delays_the_loads_of_its_own_group_alone() -> None:
    nodes = Nodes()
    poller = a_poller(nodes, a_table(NODES, 1))
    counts = await poller.run_once()
    assert (counts.groups, len(nodes.asked), counts.unanswered) == (5, 5, 0)
    nodes.hanging = NodeId(f"n{NODES[0]}")
    (hanging,) = [node_id for node_id in nodes.asked if node_id == nodes.hanging]
    for _ in range(5):
        await poller.run_once()
    assert nodes.asked[hanging] == 2, "it is not asked again before it has answered"
    assert {count for node_id, count in nodes.asked.items() if node_id != hanging} == {6}
    # Once the other node has failed to answer too, the router pings the members itself.
    nodes.let_go.set()
    while not poller.unanswered:
        await poller.run_once()
    assert len(poller.unanswered) == 64
    assert nodes.hanging in poller.unanswered


async def test_nothing_is_awaited_after_the_end() -> None:
    nodes = Nodes()
    poller = a_poller(nodes, a_table(NODES, 1))
    nodes.hanging = NodeId(f"n{NODES[0]}")
    await poller.run_once()
    poller.close()
    for _ in range(3):
        await NextTurn()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_query_names_the_addresses_of_the_table_in_use() -> None:
    """Queries are encoded once for each table."""
    nodes = Nodes()
    table = a_table(NODES, 1)
    poller = a_poller(nodes, table)
    await poller.run_once()
    group_id = next(iter(nodes.asked))
    before = poller._queries[group_id]
    await poller.run_once()
    assert poller._queries[group_id] is before
    moved = [msgspec.structs.replace(route, address="http://moved:1") for route in table.routes]
    poller._fleet.adopt(msgspec.structs.replace(table, routes=tuple(moved)))
    await poller.run_once()
    query: LoadsQuery = codec.decode(poller._queries[group_id], QUERY)
    assert {node.address for node in query.nodes} == {"http://moved:1"}
