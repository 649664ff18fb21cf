"""Tells the record when a node is lost and when it is back, once each, whoever acts."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.decide.cluster import Liveness
from scheduler.decide.membership import judge_liveness
from scheduler.store.known_nodes import read_nodes
from scheduler.store.losses import read_lost, record_losses
from scheduler.store.pool import transaction


class Noted(NamedTuple):
    """One turn's counts."""

    lost: int = 0
    back: int = 0


class NoteLosses:
    """Judged as placement judges it: what a freeze or a new term forbids to lose is not lost."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> Noted:
        """Read the nodes, judge, and record what changed."""
        acting = self._acting
        if not acting.is_acting:
            return Noted()
        heard = acting.heard()
        async with transaction(acting.pool, isolation="repeatable_read") as connection:
            noted = await read_lost(connection)
            _, nodes = await read_nodes(connection, heard, acting.known_nodes)
        verdicts = judge_liveness(nodes, heard.acting_for_s, acting.config.liveness).by_node
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
                await record_losses(connection, acting.epoch, lost, back)
        return Noted(len(lost), len(back))
