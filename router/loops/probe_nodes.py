"""Probes every node: its round trip, the loads of its replicas, and whether it answers at all.

In a large fleet most nodes are not pinged in each round: one node of a PoP answers for the others
(`pop_loads.py`). Only the router's own pings decide that a node is lost.

A node that answered the last probe gets a second ping before it counts as silent, on a fresh
connection, because the network may have dropped the kept one. A node that was silent gets one ping.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain
from time import perf_counter
from typing import Final, NamedTuple

from isochrone.wire.http import headers
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.peers.routes import Route
from router.dataplane.exchange import AttemptFailed, NodeRequest, ResponseHead
from router.dataplane.http1 import format_headers
from router.dataplane.upstream import Upstream
from router.decide.attempt import FailureCause
from router.decide.liveness.outlier_ejection import lost_nodes
from router.decide.liveness.probe_plan import nodes_to_ping
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState
from router.recording.metrics import Metrics

CONCURRENT_MAX: Final = 64
"""Tasks that ping. With one for each of 5,000 nodes, their start alone stopped the event loop for
70 ms."""

PONG_BYTES_MAX: Final = 64 * 1024

_LOADS: Final = headers.LOADS.encode()


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
        on_dropped_answer: Callable[[Route, str], None],
        on_node_lost: Callable[[NodeId, float], None],
        timeout_s: float,
        interval_s: float,
        unanswered: Callable[[], Set[NodeId]],
    ) -> None:
        """Also probe the `dropped` replicas, which the table may lack, one by one.

        `on_dropped_answer` gets each of them that was answered for, and the refusal or "".
        `unanswered` gives the nodes of which no other node knows the load. `on_node_lost` gets a
        lost node and the monotonic time since when it is silent.
        """
        self._fleet = fleet
        self._attempts = AttemptFeedback(fleet)
        self._probes = ProbeFeedback(fleet)
        self._upstream = upstream
        self._metrics = metrics
        self._dropped = dropped
        self._on_dropped_answer = on_dropped_answer
        self._on_node_lost = on_node_lost
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._unanswered = unanswered
        self._answered_last: set[NodeId] = set()
        self._pinged_at_s: dict[NodeId, float] = {}

    async def run_once(self) -> ProbeCounts:
        """Ping the nodes whose turn it is: in a small fleet all."""
        fleet = self._fleet
        addresses = fleet.directory.node_addresses()
        self._answered_last &= addresses.keys()
        for node_id in self._pinged_at_s.keys() - addresses.keys():
            del self._pinged_at_s[node_id]
        busy = (fleet.directory.route(replica) for replica in fleet.in_flight.busy_replicas())
        pinged = nodes_to_ping(
            addresses.keys(),
            used={route.node_id for route in busy if route is not None},
            unanswered=self._unanswered(),
            pinged_at_s=self._pinged_at_s,
            interval_s=self._interval_s,
            now_s=fleet.clock(),
        )
        silent_since_s: dict[NodeId, float] = {}
        jobs: Iterator[NodeId | Route] = chain(pinged, self._dropped())
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENT_MAX):
                tasks.create_task(self._ping_each(jobs, addresses, silent_since_s))
        for node_id in lost_nodes(silent_since_s.keys(), len(addresses)):
            self._metrics.ejections.labels("node_lost").inc(self._probes.eject_node(node_id))
            self._on_node_lost(node_id, silent_since_s[node_id])
        return ProbeCounts(len(addresses) - len(silent_since_s), len(silent_since_s))

    async def _ping_each(
        self,
        jobs: Iterator[NodeId | Route],
        addresses: Mapping[NodeId, str],
        silent_since_s: dict[NodeId, float],
    ) -> None:
        """Ping nodes, and replicas one by one, until there are no more; note the silent nodes."""
        for job in jobs:
            with suppress(AttemptFailed):
                if isinstance(job, Route):
                    await self._probe_replica(job)
                elif (since_s := await self._ping(job, addresses[job])) is not None:
                    silent_since_s[job] = since_s
            # A ping that fails at once must not keep requests waiting for all that follow.
            await asyncio.sleep(0)

    async def _ping(self, node_id: NodeId, address: str) -> float | None:
        """Ping a node; return since when it is silent, None if it answers."""
        since_s = self._upstream.clock()
        self._pinged_at_s[node_id] = self._fleet.clock()
        # The first ping to a node includes the handshake of its connection: it is not timed.
        if node_id in self._answered_last or await self._get(node_id, address) is not None:
            began = perf_counter()
            head = await self._get(node_id, address)
            if head is not None:
                took_ms = 1000 * (perf_counter() - began)
                self._probes.record_ping(node_id, took_ms, _loads_of(head))
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
        replica_header: dict[str, str] = {headers.REPLICA: route.replica_id}
        head = await self._get(route.node_id, route.address, replica_header)
        if head is not None:
            self._attempts.record_answer_head(route, None, head.refusal)
            # A node refuses no ping for a replica that it is still loading: it lists no load of it.
            is_loading = _LOADS in head.fields and route.replica_id not in _loads_of(head)
            self._on_dropped_answer(route, head.refusal or ("loading" if is_loading else ""))

    async def _get(
        self, node_id: NodeId, address: str, extra_headers: dict[str, str] | None = None
    ) -> ResponseHead | None:
        """Request `/ping`; return the head of the answer, None if there is none.

        Raises AttemptFailed if this machine lacks a port or descriptor: that says nothing of the
        node.
        """
        request_headers = {headers.ROUTER: self._fleet.name, **(extra_headers or {})}
        request = NodeRequest("GET", "/ping", format_headers(request_headers), b"")
        try:
            exchange = await self._upstream.fetch(
                node_id, address, request, self._timeout_s, PONG_BYTES_MAX
            )
        except AttemptFailed as failure:
            if failure.cause is FailureCause.EXHAUSTED:
                raise
            return None
        head = exchange.response_head()
        return None if head.status >= 500 else head


def _loads_of(head: ResponseHead) -> Mapping[ReplicaId, headers.ReportedLoad]:
    """Return the loads of the warm replicas that a pong lists."""
    return headers.parse_loads(head.fields.get(_LOADS, b"").decode("latin-1"))
