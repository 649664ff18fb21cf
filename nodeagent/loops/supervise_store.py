"""Runs the master of the PoP's store of KV while the assignment names this node, and only then."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from nodeagent.host.store_master import StoreMaster, missing_master


class StoreCounts(NamedTuple):
    """The counts of one turn: masters started, and connections cut because the master has moved."""

    started: int = 0
    cut: int = 0


class SuperviseStore:
    """Makes the master's process and the connections to it match the assignment."""

    def __init__(
        self,
        node_id: NodeId,
        place: Callable[[], StoreMasterPlace | None],
        master: StoreMaster,
        drop_stale: Callable[[], Awaitable[int]],
        clock: Callable[[], float],
    ) -> None:
        """`place` is what the assignment says; `drop_stale` cuts connections to another place."""
        self._node_id = node_id
        self._place = place
        self._master = master
        self._drop_stale = drop_stale
        self._clock = clock

    async def run_once(self) -> StoreCounts:
        """Start or stop the master, and cut connections to an earlier place."""
        place = self._place()
        is_started = False
        if place is None or place.node_id != self._node_id:
            await self._master.stop()
        elif not missing_master():
            is_started = await self._master.ensure_runs(self._clock())
        return StoreCounts(int(is_started), await self._drop_stale())
