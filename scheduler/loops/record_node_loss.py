"""Records an event when a node is lost and when it is back, once each, whichever scheduler acts."""

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.decide.cluster import Liveness
from scheduler.decide.membership import LivenessLimits, judge_liveness
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.heartbeats import Heartbeats
from scheduler.store.fleet.node_losses import read_lost_nodes, record_node_losses
from scheduler.store.fleet.node_reports import NodeReportCache, read_nodes
from scheduler.store.pool import Pool, transaction


class NodeLossCounts(NamedTuple):
    """How many nodes one turn recorded as lost and as back."""

    lost: int = 0
    back: int = 0


@dataclass(eq=False, kw_only=True)
class RecordNodeLoss:
    """Judges as placement does: during a freeze or a new term's grace period no node is lost."""

    pool: Pool
    lease: LeaseState
    heartbeats: Heartbeats
    reports: NodeReportCache
    limits: LivenessLimits

    async def run_once(self) -> NodeLossCounts:
        """Compare the recorded losses with the nodes' liveness now; record the differences."""
        if not self.lease.is_acting:
            return NodeLossCounts()
        heard = self.heartbeats.observed()
        async with transaction(self.pool, isolation="repeatable_read") as connection:
            recorded = await read_lost_nodes(connection)
            _, nodes = await read_nodes(connection, heard, self.reports)
        verdicts = judge_liveness(nodes, heard.acting_for_s, self.limits).by_node
        lost = [
            node
            for node in nodes
            if node.node_id not in recorded
            and not node.revoked
            and verdicts[node.node_id] is Liveness.LOST
        ]
        back = [
            (node, recorded[node.node_id])
            for node in nodes
            if node.node_id in recorded
            and not node.revoked
            and verdicts[node.node_id] is Liveness.READY
        ]
        if lost or back:
            async with transaction(self.pool) as connection:
                await record_node_losses(connection, self.lease.epoch, lost, back)
        return NodeLossCounts(len(lost), len(back))
