"""Probing: how far each node is, how busy, and whether what a doubtful table drops answers."""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, NamedTuple

from isochrone.wire import headers
from isochrone.wire.ids import NodeId
from isochrone.wire.routes import Route
from router.dataplane.exchange import AttemptFailed, Head
from router.dataplane.http1 import lines_of
from router.dataplane.upstream import Upstream
from router.fleet import Fleet
from router.metrics import Metrics

AT_ONCE_MAX: Final = 64
PONG_BYTES_MAX: Final = 64 * 1024

_LOADS: Final = headers.LOADS.encode()


class Probed(NamedTuple):
    """One turn: nodes that answered, and nodes that did not."""

    answered: int
    silent: int


class Prober:
    """Pings every node of the table over connections that are kept."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        dropped: Callable[[], Sequence[Route]],
        timeout_s: float,
    ) -> None:
        """Ask also the `dropped` replicas of a table that is held, one by one."""
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._dropped = dropped
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._known: set[NodeId] = set()

    async def run_once(self) -> Probed:
        """Ping every node once."""
        nodes = self._fleet.nodes()
        self._known &= set(nodes)
        async with asyncio.TaskGroup() as tasks:
            pings = [tasks.create_task(self._ping(*node)) for node in nodes.items()]
            for route in self._dropped():
                tasks.create_task(self._ask(route))
        answered = sum(ping.result() for ping in pings)
        return Probed(answered, len(pings) - answered)

    async def _ping(self, node_id: NodeId, address: str) -> bool:
        async with self._places:
            if node_id not in self._known:
                # The first pays for the connection's handshake: not measured.
                if await self._once(address) is None:
                    return self._silent(node_id)
                self._known.add(node_id)
            began = perf_counter()
            head = await self._once(address)
            if head is None:
                return self._silent(node_id)
            took_ms = 1000 * (perf_counter() - began)
            loads = head.fields.get(_LOADS, b"").decode("latin-1")
            self._fleet.pinged(node_id, took_ms, headers.parse_loads(loads))
            return True

    async def _ask(self, route: Route) -> None:
        async with self._places:
            head = await self._once(route.address, {headers.REPLICA: route.replica_id})
            if head is not None:
                self._fleet.heard(route, None, head.refused)

    async def _once(self, address: str, sent: dict[str, str] | None = None) -> Head | None:
        """Return the head of the node's answer; None where it is silent."""
        sent = {headers.ROUTER: self._fleet.name, **(sent or {})}
        request = ("GET", "/ping", lines_of(sent), b"")
        try:
            exchange = self._upstream.ask(
                NodeId(address), address, request, self._timeout_s, PONG_BYTES_MAX
            )
            try:
                await exchange.opened
                head = exchange.answer()
            finally:
                exchange.leave()
        except AttemptFailed:
            return None
        return None if head.status >= 500 else head

    def _silent(self, node_id: NodeId) -> bool:
        self._known.discard(node_id)
        self._fleet.silent(node_id)
        self._metrics.probe_failures.inc()
        return False
