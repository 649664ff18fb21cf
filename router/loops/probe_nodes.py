"""Probing: how far each node is, how busy, whether it is gone; and who of a dropped table answers.

A node that answered last time is asked twice before it counts as silent, and the second time on a
fresh connection: a network may have dropped the kept one. One that was silent is asked once.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, NamedTuple

from isochrone.wire import headers
from isochrone.wire.ids import NodeId
from isochrone.wire.routes import Route
from router.dataplane.exchange import AttemptFailed, NodeRequest, ResponseHead
from router.dataplane.http1 import format_headers
from router.dataplane.upstream import Upstream
from router.decide.health import lost_nodes
from router.fleet_state import FleetState
from router.metrics import Metrics

CONCURRENT_MAX: Final = 64
PONG_BYTES_MAX: Final = 64 * 1024

_LOADS: Final = headers.LOADS.encode()


class ProbeCounts(NamedTuple):
    """One turn: nodes that answered, and nodes that did not."""

    answered: int
    silent: int


class NodeProber:
    """Pings every node of the table over connections that are kept."""

    def __init__(
        self,
        *,
        fleet: FleetState,
        upstream: Upstream,
        metrics: Metrics,
        dropped: Callable[[], Sequence[Route]],
        let_go: Callable[[NodeId, float], None],
        timeout_s: float,
    ) -> None:
        """Ask also the `dropped` replicas of a table that is held, one by one.

        `let_go` is told which node is gone, and since when it is silent.
        """
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._dropped = dropped
        self._let_go = let_go
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(CONCURRENT_MAX)
        self._known: set[NodeId] = set()

    async def run_once(self) -> ProbeCounts:
        """Ping every node once."""
        nodes = self._fleet.node_addresses()
        self._known &= set(nodes)
        async with asyncio.TaskGroup() as tasks:
            pings = {one: tasks.create_task(self._ping(one, at)) for one, at in nodes.items()}
            for route in self._dropped():
                tasks.create_task(self._ask(route))
        silent = {one: since for one, ping in pings.items() if (since := ping.result()) is not None}
        for node_id in lost_nodes(silent.keys(), len(nodes)):
            self._metrics.ejections.labels("gone").inc(self._fleet.eject_node(node_id))
            self._let_go(node_id, silent[node_id])
        return ProbeCounts(len(nodes) - len(silent), len(silent))

    async def _ping(self, node_id: NodeId, address: str) -> float | None:
        """Ping a node; where it is silent, return since when."""
        async with self._places:
            since_s = self._upstream.clock()
            # The first pays for the connection's handshake: not measured.
            if node_id in self._known or await self._once(node_id, address) is not None:
                began = perf_counter()
                head = await self._once(node_id, address)
                if head is not None:
                    took_ms = 1000 * (perf_counter() - began)
                    loads = head.fields.get(_LOADS, b"").decode("latin-1")
                    self._fleet.record_ping(node_id, took_ms, headers.parse_loads(loads))
                    self._known.add(node_id)
                    return None
                self._upstream.close_idle(node_id)
                if await self._once(node_id, address) is not None:
                    return None
            self._known.discard(node_id)
            self._fleet.record_ping_timeout(node_id)
            self._metrics.probe_failures.inc()
            return since_s

    async def _ask(self, route: Route) -> None:
        async with self._places:
            sent: dict[str, str] = {headers.REPLICA: route.replica_id}
            head = await self._once(route.node_id, route.address, sent)
            if head is not None:
                self._fleet.record_answer_head(route, None, head.refusal)

    async def _once(
        self, node_id: NodeId, address: str, sent: dict[str, str] | None = None
    ) -> ResponseHead | None:
        """Return the head of the node's answer; None where it is silent."""
        sent = {headers.ROUTER: self._fleet.name, **(sent or {})}
        request = NodeRequest("GET", "/ping", format_headers(sent), b"")
        try:
            exchange = await self._upstream.fetch(
                node_id, address, request, self._timeout_s, PONG_BYTES_MAX
            )
        except AttemptFailed:
            return None
        head = exchange.response_head()
        return None if head.status >= 500 else head
