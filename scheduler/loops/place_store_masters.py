"""Sends nodes their assignments again when the master of their PoP's store of KV moves.

The choice itself is made wherever an assignment is read. So a node that connects has it at once,
and this job keeps only what it has sent.
"""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from scheduler.decide.membership import store_masters
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.store.fleet.store_members import read_store_members
from scheduler.store.pool import Pool, transaction

log = logging.getLogger(__name__)


class StoreMasterCounts(NamedTuple):
    """How many PoPs have a store of KV, and how many nodes were sent a new place of its master."""

    stores: int = 0
    sent: int = 0


@dataclass(eq=False, kw_only=True)
class PlaceStoreMasters:
    """Follows losses, drains and ends of replicas, which are other jobs' decisions."""

    pool: Pool
    lease: LeaseState
    assignments: AssignmentOutbox
    _sent: dict[NodeId, StoreMasterPlace | None] = field(default_factory=dict, init=False)

    async def run_once(self) -> StoreMasterCounts:
        """Compare each member's place of the master with the last one sent."""
        if not self.lease.is_acting:
            self._sent = {}
            return StoreMasterCounts()
        async with transaction(self.pool, isolation="repeatable_read") as connection:
            members = await read_store_members(connection)
        places = store_masters(members)
        master_places = {member.node_id: places.get(member.pop) for member in members}
        moved = [
            node_id
            for node_id in master_places
            if self._sent.get(node_id) != master_places[node_id]
        ]
        # A node that has no member any more may still run the master.
        moved += [node_id for node_id in self._sent if node_id not in master_places]
        for node_id in sorted(moved):
            place = master_places.get(node_id)
            fields = {"node": node_id, "master_at": place.node_id if place else ""}
            log.info("the KV store's master is placed", extra={"fields": fields})
        sent = await self.assignments.send_to(sorted(moved))
        self._sent = master_places
        return StoreMasterCounts(len(places), sent)
