"""Which nodes have not reported in this term yet, and how long a term waits for them."""

from dataclasses import dataclass

from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.store.fleet.nodes import read_node_ids
from scheduler.store.lease import are_routes_after_loss
from scheduler.store.pool import Pool, using


@dataclass(eq=False, kw_only=True)
class FirstReports:
    """Says whether to wait: a term adopts what nodes report before it decides what they run.

    After the database has lost history, the store may lack whole deployments whose replicas run. So
    the first route table waits for reports too, and longer: a route that it lacks is withdrawn,
    while routers go on with the table that they have. The database remembers the loss until then,
    because another scheduler may take over in this wait.

    Placement waits up to `hear_first_s` from the beginning of a term for every known node. After a
    loss, routes wait up to `lost_after_s`: a node that has not found this scheduler by then counts
    as lost.
    """

    lease: LeaseState
    peers: PeerRegistry
    hear_first_s: float
    lost_after_s: float

    async def must_placement_wait(self, pool: Pool) -> bool:
        """Return whether a plan would be made without the first report of a known node."""
        return await self._are_missing(pool, self.hear_first_s)

    async def must_routes_wait(self, pool: Pool) -> bool:
        """Return whether the first table would lack routes that only a node's report can add."""
        async with using(pool) as connection:
            is_after_loss = await are_routes_after_loss(connection)
        return is_after_loss and await self._are_missing(pool, self.lost_after_s)

    async def _are_missing(self, pool: Pool, wait_max_s: float) -> bool:
        if self.lease.acting_for_s >= wait_max_s:
            return False
        async with using(pool) as connection:
            node_ids = await read_node_ids(connection)
        reported = {peer.name for peer in self.peers.agents() if peer.has_reported}
        return not reported.issuperset(node_ids)
