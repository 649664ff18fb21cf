"""Read the loads of a large fleet: one node of a PoP answers for the others.

If that node fails, the router queries another at once; if none answers, it pings the nodes itself.
"""

import asyncio
from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from isochrone.wire import codec, headers
from isochrone.wire.ids import DeploymentId, NodeId
from isochrone.wire.pop_loads import ANSWER_BYTES_MAX, LoadsQuery, PopLoads, ProbedNode
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.dataplane.http1 import format_headers
from router.dataplane.upstream import Upstream
from router.decide.probe_plan import ProbeGroup, plan_groups, unanswered
from router.feedback import ProbeFeedback
from router.fleet_state import FleetState
from router.metrics import Metrics

CONCURRENT_MAX: Final = 64
_POP_LOADS: Final = codec.decoder(PopLoads)


class PopLoadCounts(NamedTuple):
    """The number of groups queried in one turn, and of nodes whose load is not known."""

    groups: int = 0
    unanswered: int = 0


class PopLoadPoller:
    """Asks one node of each group of nodes for the loads of all."""

    def __init__(
        self, *, fleet: FleetState, upstream: Upstream, metrics: Metrics, timeout_s: float
    ) -> None:
        self.unanswered: Set[NodeId] = frozenset()
        """Nodes whose loads no other node knows, as of the last turn."""
        self._fleet = fleet
        self._probes = ProbeFeedback(fleet)
        self._upstream = upstream
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._failed_at_s: dict[NodeId, float] = {}

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
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(group, addresses)) for group in plan.groups]
        self.unanswered = frozenset(plan.alone).union(*(group.result() for group in asked))
        return PopLoadCounts(len(plan.groups), len(self.unanswered))

    async def _ask(self, group: ProbeGroup, addresses: Mapping[NodeId, str]) -> Set[NodeId]:
        """Ask one node about all of its group, another if it fails; return the unanswered."""
        nodes = tuple(ProbedNode(node_id, addresses[node_id]) for node_id in group.node_ids)
        query = codec.encode(LoadsQuery(nodes))
        ages_ms: dict[NodeId, float] = {}
        async with self._slots:
            for answerer in group.answerers:
                loads = await self._fetch(answerer, addresses[answerer], query)
                if loads is not None:
                    ages_ms = self._record(loads, set(group.node_ids))
                    break
                self._metrics.pop_loads_failures.inc()
                self._failed_at_s[answerer] = self._fleet.clock()
        return unanswered(group.node_ids, ages_ms)

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
        ages_ms = {node.node_id: node.age_ms for node in loads.nodes if node.node_id in members}
        too_old = unanswered(ages_ms, ages_ms)
        deployment_ids: set[DeploymentId] = set()
        for node in loads.nodes:
            if node.node_id in ages_ms and node.node_id not in too_old:
                reported = headers.parse_loads(node.loads)
                deployment_ids |= self._probes.record_relayed(
                    node.node_id, node.age_ms / 1000, reported
                )
                self._metrics.pop_loads.inc()
        self._fleet.refresh_changed(deployment_ids)
        return ages_ms
