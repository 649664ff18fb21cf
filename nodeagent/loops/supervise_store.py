"""Runs the master of the PoP's store of KV while the assignment names this node, and only then."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from nodeagent.host.store_master import StoreMaster, missing_master


class StoreCounts(NamedTuple):
    """The counts of one turn: masters started, and connections cut because the master has moved."""

    started: int = 0
    cut: int = 0


@dataclass(eq=False)
class SuperviseStore:
    """Makes the master's process and the connections to it match the assignment.

    `place` is what the assignment says; `drop_stale` cuts connections to another place.
    """

    node_id: NodeId
    place: Callable[[], StoreMasterPlace | None]
    master: StoreMaster
    drop_stale: Callable[[], Awaitable[int]]
    clock: Callable[[], float]

    async def run_once(self) -> StoreCounts:
        """Start or stop the master, and cut connections to an earlier place."""
        place = self.place()
        is_started = False
        if place is None or place.node_id != self.node_id:
            await self.master.stop()
        elif not missing_master():
            is_started = await self.master.ensure_runs(self.clock())
        return StoreCounts(int(is_started), await self.drop_stale())
