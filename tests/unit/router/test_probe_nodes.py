"""Probing nodes: how many at a time, on a clock set by hand and nodes that answer or do not."""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any, cast

from isochrone.wire.http import headers
from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.routes import Route
from router.dataplane.exchange import AttemptFailed, ResponseHead
from router.decide.attempt import FailureCause
from router.fleet_state import FleetState
from router.loops.probe_nodes import CONCURRENT_MAX, NodeProber, ProbeCounts
from router.recording.metrics import Metrics
from tests.unit.router.test_follow_routes import a_route, a_table

NODES = "".join(chr(0x4E00 + number) for number in range(1000))


class NextTurn:
    """Waits for the next turn of the event loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class SilentNodes:
    """Connections to nodes of which none answers: after a turn of the event loop, or at once."""

    def __init__(self, *, is_slow: bool, cause: FailureCause = FailureCause.UNREACHABLE) -> None:
        self.is_slow = is_slow
        self.cause = cause
        self.asked: Counter[NodeId] = Counter()
        self.tasks_most = 0
        self.turns_at: list[int] = []
        self.turns = 0

    def clock(self) -> float:
        return 100.0

    def close_idle(self, node_id: NodeId) -> None:
        pass

    async def fetch(self, node_id: NodeId, *arguments: object) -> None:
        self.asked[node_id] += 1
        self.turns_at.append(self.turns)
        self.tasks_most = max(self.tasks_most, len(asyncio.all_tasks()))
        if self.is_slow:
            await NextTurn()
        raise AttemptFailed(self.cause, "no connection")

    async def count_turns(self) -> None:
        while True:
            await NextTurn()
            self.turns += 1


class NodesThatList:
    """Connections to nodes that answer with the loads of `warm` replicas; "" is no header."""

    def __init__(self, warm: str) -> None:
        self._fields = {headers.LOADS.encode(): warm.encode()} if warm else {}

    def clock(self) -> float:
        return 100.0

    async def fetch(self, *arguments: object) -> Any:
        head = ResponseHead(204, self._fields)
        return SimpleNamespace(response_head=lambda: head)


async def answers_of(nodes: NodesThatList, names: str) -> dict[str, str]:
    """Return what nodes answer for dropped replicas."""
    fleet = FleetState(PopId("ams"), nodes.clock, "boot")
    answers: dict[str, str] = {}
    prober = a_prober(
        fleet, nodes, names, lambda route, refusal: answers.update({route.replica_id: refusal})
    )
    await prober.run_once()
    return answers


def a_prober(
    fleet: FleetState, nodes: object, dropped: str, on_answer: Callable[[Route, str], None]
) -> NodeProber:
    return NodeProber(
        fleet=fleet,
        upstream=cast(Any, nodes),
        metrics=Metrics(),
        dropped=lambda: [a_route(name) for name in dropped],
        on_dropped_answer=on_answer,
        on_node_lost=lambda node_id, since_s: None,
        timeout_s=1.0,
        interval_s=2.0,
        unanswered=lambda: fleet.directory.nodes,
    )


async def probe(nodes: SilentNodes, dropped: str = "") -> ProbeCounts:
    fleet = FleetState(PopId("ams"), nodes.clock, "boot")
    fleet.adopt(a_table(NODES, 1))
    prober = a_prober(fleet, nodes, dropped, lambda route, refusal: None)
    turns = asyncio.create_task(nodes.count_turns())
    counts = await prober.run_once()
    turns.cancel()
    return counts


async def test_a_round_over_a_thousand_nodes_has_a_bounded_number_of_tasks() -> None:
    nodes = SilentNodes(is_slow=True)
    assert await probe(nodes, dropped=NODES[:3]) == ProbeCounts(answered=0, silent=1000)
    assert len(nodes.asked) == 1000
    # The test's own task, the one that counts turns, and those that ping.
    assert nodes.tasks_most <= CONCURRENT_MAX + 2


async def test_pings_that_fail_at_once_leave_turns_to_requests() -> None:
    nodes = SilentNodes(is_slow=False)
    assert await probe(nodes) == ProbeCounts(answered=0, silent=1000)
    most_in_a_turn = max(Counter(nodes.turns_at).values())
    assert most_in_a_turn <= 3 * CONCURRENT_MAX


async def test_a_node_is_not_silent_because_this_router_has_no_port_for_a_ping() -> None:
    """It was ejected, and the requests that waited for its first tokens were failed."""
    nodes = SilentNodes(is_slow=False, cause=FailureCause.EXHAUSTED)
    assert await probe(nodes, dropped=NODES[:3]) == ProbeCounts(answered=1000, silent=0)


async def test_a_withdrawn_replica_serves_once_its_node_lists_its_load() -> None:
    assert await answers_of(NodesThatList("b p=0;d=0;r=0;w=0"), "ab") == {"a": "loading", "b": ""}
    # A node that lists no loads has said all by not refusing.
    assert await answers_of(NodesThatList(""), "a") == {"a": ""}
