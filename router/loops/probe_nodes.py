"""Probe every node: its round trip, the loads of its replicas, and whether it answers at all.

In a large fleet most nodes are not pinged in each round: one node of a PoP answers for the others
(`router/decide/probe_plan.py`). Only the router's own pings decide that a node is lost.

A node that answered the last probe gets a second ping before it counts as silent, on a fresh
connection, because the network may have dropped the kept one. A node that was silent gets one ping.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from time import perf_counter
from typing import Final, NamedTuple

from isochrone.wire import codec, headers
from isochrone.wire.ids import NodeId
from isochrone.wire.pop_loads import ANSWER_BYTES_MAX, LoadsQuery, PopLoads, ProbedNode
from isochrone.wire.routes import Route
from router.dataplane.exchange import AttemptFailed, NodeRequest, ResponseHead
from router.dataplane.http1 import format_headers
from router.dataplane.upstream import Upstream
from router.decide.health import lost_nodes
from router.decide.probe_plan import ProbeGroup, ProbePlan, plan_probes, unanswered
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState
from router.metrics import Metrics

CONCURRENT_MAX: Final = 64
PONG_BYTES_MAX: Final = 64 * 1024

_LOADS: Final = headers.LOADS.encode()
_POP_LOADS: Final = codec.decoder(PopLoads)


class ProbeCounts(NamedTuple):
    """How many nodes answered in one turn, and how many did not."""

    answered: int
    silent: int


class NodeProber:
    """Pings every node of the route table over kept connections."""

    def __init__(
        self,
        *,
        fleet: FleetState,
        upstream: Upstream,
        metrics: Metrics,
        dropped: Callable[[], Sequence[Route]],
        on_node_lost: Callable[[NodeId, float], None],
        timeout_s: float,
        interval_s: float,
    ) -> None:
        """Also probe the `dropped` replicas of a quarantined table, one by one.

        `on_node_lost` gets a lost node and the monotonic time since when it is silent.
        """
        self._fleet = fleet
        self._attempts = AttemptFeedback(fleet)
        self._probes = ProbeFeedback(fleet)
        self._upstream = upstream
        self._metrics = metrics
        self._dropped = dropped
        self._on_node_lost = on_node_lost
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._interval_s = interval_s
        self._group_slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._answered_last: set[NodeId] = set()
        self._pinged_at_s: dict[NodeId, float] = {}
        self._failed_at_s: dict[NodeId, float] = {}

    async def run_once(self) -> ProbeCounts:
        """Learn the load of every node once."""
        addresses = self._fleet.directory.node_addresses()
        self._forget_nodes_but(addresses.keys())
        plan = self._plan()
        async with asyncio.TaskGroup() as tasks:
            groups = [tasks.create_task(self._ask_group(group, addresses)) for group in plan.groups]
            pings = {
                node_id: tasks.create_task(self._ping(node_id, addresses[node_id]))
                for node_id in plan.pinged
            }
            for route in self._dropped():
                tasks.create_task(self._probe_replica(route))
        left = {node_id for group in groups for node_id in group.result()} - pings.keys()
        async with asyncio.TaskGroup() as tasks:
            for node_id in left:
                pings[node_id] = tasks.create_task(self._ping(node_id, addresses[node_id]))
        silent_since_s = {
            node_id: since_s
            for node_id, ping in pings.items()
            if (since_s := ping.result()) is not None
        }
        for node_id in lost_nodes(silent_since_s.keys(), len(addresses)):
            self._metrics.ejections.labels("node_lost").inc(self._probes.eject_node(node_id))
            self._on_node_lost(node_id, silent_since_s[node_id])
        return ProbeCounts(len(addresses) - len(silent_since_s), len(silent_since_s))

    def _plan(self) -> ProbePlan:
        fleet = self._fleet
        busy = (fleet.directory.route(replica) for replica in fleet.in_flight.busy_replicas())
        return plan_probes(
            fleet.directory.node_pops(),
            router=fleet.name,
            used={route.node_id for route in busy if route is not None},
            pinged_at_s=self._pinged_at_s,
            failed_at_s=self._failed_at_s,
            interval_s=self._interval_s,
            now_s=fleet.clock(),
        )

    def _forget_nodes_but(self, node_ids: Set[NodeId]) -> None:
        self._answered_last &= node_ids
        for times in (self._pinged_at_s, self._failed_at_s):
            for node_id in times.keys() - node_ids:
                del times[node_id]

    async def _ask_group(self, group: ProbeGroup, addresses: Mapping[NodeId, str]) -> set[NodeId]:
        """Ask one node about all of its group, another if it fails; return the unanswered."""
        nodes = tuple(ProbedNode(node_id, addresses[node_id]) for node_id in group.node_ids)
        query = codec.encode(LoadsQuery(nodes))
        ages_ms: dict[NodeId, float] = {}
        async with self._group_slots:
            for answerer in group.answerers:
                loads = await self._fetch_loads(answerer, addresses[answerer], query)
                if loads is not None:
                    ages_ms = self._record_loads(loads, set(group.node_ids))
                    break
                self._metrics.pop_loads_failures.inc()
                self._failed_at_s[answerer] = self._fleet.clock()
        return unanswered(group.node_ids, ages_ms)

    async def _fetch_loads(self, node_id: NodeId, address: str, query: bytes) -> PopLoads | None:
        """Request `/loads`; return None if there is no usable answer."""
        request_headers: dict[str, str] = {headers.ROUTER: self._fleet.name}
        request = NodeRequest("POST", "/loads", format_headers(request_headers), query)
        try:
            exchange = await self._upstream.fetch(
                node_id, address, request, self._timeout_s, ANSWER_BYTES_MAX
            )
            if exchange.response_head().status != 200:
                return None
            loads: PopLoads = codec.decode(exchange.body, _POP_LOADS)
        except (AttemptFailed, codec.MalformedFrame):
            return None
        return loads

    def _record_loads(self, loads: PopLoads, members: Set[NodeId]) -> dict[NodeId, float]:
        """Note the loads of the members that are recent; return the age of each in ms."""
        ages_ms = {node.node_id: node.age_ms for node in loads.nodes if node.node_id in members}
        too_old = unanswered(ages_ms, ages_ms)
        for node in loads.nodes:
            if node.node_id in ages_ms and node.node_id not in too_old:
                reported = headers.parse_loads(node.loads)
                self._probes.record_relayed(node.node_id, node.age_ms / 1000, reported)
                self._metrics.pop_loads.inc()
        return ages_ms

    async def _ping(self, node_id: NodeId, address: str) -> float | None:
        """Ping a node; return since when it is silent, None if it answers."""
        async with self._slots:
            since_s = self._upstream.clock()
            self._pinged_at_s[node_id] = self._fleet.clock()
            # The first ping to a node includes the handshake of its connection: it is not timed.
            if node_id in self._answered_last or await self._get(node_id, address) is not None:
                began = perf_counter()
                head = await self._get(node_id, address)
                if head is not None:
                    took_ms = 1000 * (perf_counter() - began)
                    loads = head.fields.get(_LOADS, b"").decode("latin-1")
                    self._probes.record_ping(node_id, took_ms, headers.parse_loads(loads))
                    self._answered_last.add(node_id)
                    return None
                self._upstream.close_idle(node_id)
                if await self._get(node_id, address) is not None:
                    return None
            self._answered_last.discard(node_id)
            self._probes.record_ping_timeout(node_id)
            self._metrics.probe_failures.inc()
            return since_s

    async def _probe_replica(self, route: Route) -> None:
        """Ask a node whether it still serves one replica."""
        async with self._slots:
            replica_header: dict[str, str] = {headers.REPLICA: route.replica_id}
            head = await self._get(route.node_id, route.address, replica_header)
            if head is not None:
                self._attempts.record_answer_head(route, None, head.refusal)

    async def _get(
        self, node_id: NodeId, address: str, extra_headers: dict[str, str] | None = None
    ) -> ResponseHead | None:
        """Request `/ping`; return the head of the answer, None if there is none."""
        request_headers = {headers.ROUTER: self._fleet.name, **(extra_headers or {})}
        request = NodeRequest("GET", "/ping", format_headers(request_headers), b"")
        try:
            exchange = await self._upstream.fetch(
                node_id, address, request, self._timeout_s, PONG_BYTES_MAX
            )
        except AttemptFailed:
            return None
        head = exchange.response_head()
        return None if head.status >= 500 else head
