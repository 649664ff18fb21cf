"""Reads the loads of a large fleet: one node of a PoP answers for the others.

If that node fails, the router queries another at once; if none answers, it pings the nodes itself.
Groups are queried one after another: all answers at once would keep requests waiting.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Final, NamedTuple

from isochrone.wire import codec
from isochrone.wire.http import headers
from isochrone.wire.ids import DeploymentId, NodeId
from isochrone.wire.peers.pop_loads import ANSWER_BYTES_MAX, LoadsQuery, PopLoads, ProbedNode
from isochrone.wire.peers.routes import Route
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.dataplane.http1 import format_headers
from router.dataplane.upstream import Upstream
from router.decide.liveness.probe_plan import GroupPlan, ProbeGroup, plan_groups, unanswered
from router.feedback import ProbeFeedback
from router.fleet_state import FleetState
from router.recording.metrics import Metrics

SPREAD_SHARE: Final = 0.25
"""The share of the interval of probes over which a turn spreads its questions. An answer for 64
nodes takes the router a millisecond, and requests have their turn in between."""

ANSWER_WAIT_SHARE: Final = 0.25
"""The share of the interval of probes that a turn waits for the last answers. The next turn then
asks the other groups: a node that does not answer delays the loads of its own group alone."""

_POP_LOADS: Final = codec.decoder(PopLoads)


class PopLoadCounts(NamedTuple):
    """The number of groups queried in one turn, and of nodes whose load is not known."""

    groups: int = 0
    unanswered: int = 0


class PopLoadPoller:
    """Asks one node of each group of nodes for the loads of all."""

    def __init__(
        self,
        *,
        fleet: FleetState,
        upstream: Upstream,
        metrics: Metrics,
        timeout_s: float,
        interval_s: float,
    ) -> None:
        """Wait up to `timeout_s` for an answer. `interval_s` is that of probes."""
        self.unanswered: Set[NodeId] = frozenset()
        """Nodes whose loads no other node knows, as of the last turn."""
        self._fleet = fleet
        self._probes = ProbeFeedback(fleet)
        self._upstream = upstream
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._failed_at_s: dict[NodeId, float] = {}
        # By the first node of a group.
        self._asking: dict[NodeId, asyncio.Task[None]] = {}
        self._missing: dict[NodeId, Set[NodeId]] = {}
        self._queries: dict[NodeId, bytes] = {}
        self._queried_routes: Collection[Route] = ()
        """The routes of the table that the queries were made of."""

    async def run_once(self) -> PopLoadCounts:
        """Read the loads of all nodes once; in a small fleet, of none."""
        fleet = self._fleet
        plan = plan_groups(
            fleet.directory.node_pops(),
            router=fleet.name,
            failed_at_s=self._failed_at_s,
            now_s=fleet.clock(),
        )
        addresses = fleet.directory.node_addresses()
        for node_id in self._failed_at_s.keys() - addresses.keys():
            del self._failed_at_s[node_id]
        self._forget_groups(plan)
        await self._ask_each(plan.groups, addresses)
        self.unanswered = frozenset(plan.alone).union(*self._missing.values())
        return PopLoadCounts(len(plan.groups), len(self.unanswered))

    def close(self) -> None:
        """Wait for no answer any more."""
        for task in self._asking.values():
            task.cancel()

    def _forget_groups(self, plan: GroupPlan) -> None:
        """Forget groups that no longer exist."""
        first_ids = {group.node_ids[0] for group in plan.groups}
        for node_id in self._missing.keys() - first_ids:
            del self._missing[node_id]
        table = self._fleet.directory.table
        routes = table.routes if table is not None else ()
        if routes is not self._queried_routes:
            self._queries.clear()
            self._queried_routes = routes

    async def _ask_each(
        self, groups: Sequence[ProbeGroup], addresses: Mapping[NodeId, str]
    ) -> None:
        """Ask the groups one after another, but those that still have to answer from before."""
        queries: list[asyncio.Task[None]] = []
        began_s, spread_s = self._fleet.clock(), SPREAD_SHARE * self._interval_s
        for number, group in enumerate(groups):
            due_s = began_s + spread_s * number / len(groups)
            await asyncio.sleep(max(0.0, due_s - self._fleet.clock()))
            first_id = group.node_ids[0]
            if first_id not in self._asking:
                task = asyncio.create_task(self._ask(group, addresses))
                self._asking[first_id] = task
                queries.append(task)
        if queries:
            done, _ = await asyncio.wait(queries, timeout=ANSWER_WAIT_SHARE * self._interval_s)
            for task in done:
                task.result()

    async def _ask(self, group: ProbeGroup, addresses: Mapping[NodeId, str]) -> None:
        """Ask one node about all of its group, another if it fails; note the unanswered."""
        first_id = group.node_ids[0]
        try:
            query = self._query(group, addresses)
            ages_ms: dict[NodeId, float] = {}
            for answerer in group.answerers:
                loads = await self._fetch(answerer, addresses[answerer], query)
                if loads is not None:
                    ages_ms = self._record(loads, set(group.node_ids))
                    break
                self._metrics.pop_loads_failures.inc()
                self._failed_at_s[answerer] = self._fleet.clock()
            self._missing[first_id] = unanswered(group.node_ids, ages_ms)
        finally:
            del self._asking[first_id]

    def _query(self, group: ProbeGroup, addresses: Mapping[NodeId, str]) -> bytes:
        """Return the question about a group, encoded once for each table."""
        query = self._queries.get(group.node_ids[0])
        if query is None:
            nodes = tuple(ProbedNode(node_id, addresses[node_id]) for node_id in group.node_ids)
            query = self._queries[group.node_ids[0]] = codec.encode(LoadsQuery(nodes))
        return query

    async def _fetch(self, node_id: NodeId, address: str, query: bytes) -> PopLoads | None:
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

    def _record(self, loads: PopLoads, members: Set[NodeId]) -> dict[NodeId, float]:
        """Note the loads of the members that are recent; return the age of each in ms."""
        # The last entry of a node that is named twice, so that the age checked is the one used.
        by_id = {node.node_id: node for node in loads.nodes if node.node_id in members}
        ages_ms = {node_id: node.age_ms for node_id, node in by_id.items()}
        deployment_ids: set[DeploymentId] = set()
        for node_id in by_id.keys() - unanswered(ages_ms, ages_ms):
            reported = headers.parse_loads(by_id[node_id].loads)
            age_s = ages_ms[node_id] / 1000
            deployment_ids |= self._probes.record_relayed(node_id, age_s, reported)
            self._metrics.pop_loads.inc()
        self._fleet.refresh_changed(deployment_ids)
        return ages_ms
