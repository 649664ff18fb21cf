"""Tells the record when a node is lost and when it is back, once each, whoever acts."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.decide.cluster import Liveness
from scheduler.decide.liveness import liveness
from scheduler.store.node_losses import read_lost_nodes, record_node_losses
from scheduler.store.node_reports import read_nodes
from scheduler.store.pool import transaction


class NodeLossCounts(NamedTuple):
    """One turn's counts."""

    lost: int = 0
    back: int = 0


class RecordNodeLoss:
    """Judged as placement judges it: what a freeze or a new term forbids to lose is not lost."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> NodeLossCounts:
        """Read the nodes, judge, and record what changed."""
        acting = self._acting
        if not acting.is_acting:
            return NodeLossCounts()
        heard = acting.heard()
        async with transaction(acting.pool, isolation="repeatable_read") as connection:
            noted = await read_lost_nodes(connection)
            _, nodes = await read_nodes(connection, heard, acting.known_nodes)
        verdicts = liveness(nodes, heard.acting_for_s, acting.config.liveness).by_node
        lost = [
            node
            for node in nodes
            if node.node_id not in noted
            and not node.revoked
            and verdicts[node.node_id] is Liveness.LOST
        ]
        back = [
            (node, noted[node.node_id])
            for node in nodes
            if node.node_id in noted
            and not node.revoked
            and verdicts[node.node_id] is Liveness.READY
        ]
        if lost or back:
            async with transaction(acting.pool) as connection:
                await record_node_losses(connection, acting.epoch, lost, back)
        return NodeLossCounts(len(lost), len(back))
