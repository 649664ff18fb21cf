"""Tells the record when a node is lost and when it is back, once each, whoever acts."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.decide.cluster import Liveness
from scheduler.decide.liveness import liveness
from scheduler.store.losses import read_silences, record_losses
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
        """Read the silences, judge, and record what changed."""
        acting = self._acting
        if not acting.is_acting:
            return Noted()
        heard = acting.heard()
        async with transaction(acting.pool) as connection:
            silences = await read_silences(connection, heard)
            view = liveness(
                [silence.node for silence in silences], heard.acting_for_s, acting.config.liveness
            )
            lost = [
                silence
                for silence in silences
                if silence.lost_for_s is None
                and view.by_node[silence.node.node_id] is Liveness.LOST
            ]
            back = [
                silence
                for silence in silences
                if silence.lost_for_s is not None
                and view.by_node[silence.node.node_id] is Liveness.READY
            ]
            if lost or back:
                await record_losses(connection, acting.epoch, lost, back)
        return Noted(len(lost), len(back))
