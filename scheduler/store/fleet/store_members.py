"""The replicas that share KV through a vendor's store, for the choice of its master's node."""

import msgspec

from isochrone.wire.ids import NodeId, PopId, ReplicaId
from isochrone.wire.kv.kv_store import uses_kv_store
from isochrone.wire.peers.assignment import ReplicaSpec
from scheduler.decide.membership import StoreMember
from scheduler.store.pool import Connection
from scheduler.store.readable_rows import RowReader


async def read_store_members(
    connection: Connection, *, pop_of: NodeId | None = None
) -> list[StoreMember]:
    """Return the replicas that share KV through a store: all, or those of one node's PoP."""
    rows = await connection.fetch(
        """
        SELECT p.replica_id, p.spec, n.pop, n.node_id, n.address,
            extract(epoch FROM p.placed_at)::float8 AS placed_at,
            n.draining OR n.revoked OR n.lost_at IS NOT NULL OR p.state = 'failed' AS is_away
        FROM placement p JOIN node n USING (node_id)
        -- What is released has ended, too; the indexes are of what is not.
        WHERE p.released_at IS NULL AND p.ended_at IS NULL
          AND p.spec #>> '{engine,share_kv}' = 'true'
          AND ($1::text IS NULL OR n.pop = (SELECT pop FROM node WHERE node_id = $1))
        """,
        pop_of,
    )
    # A replica that cannot be read keeps running, and others can be the master's.
    specs = RowReader().read_each(
        "placement",
        rows,
        lambda row: (msgspec.json.decode(row["spec"], type=ReplicaSpec), row),
        name="replica_id",
    )
    return [
        StoreMember(
            replica_id=ReplicaId(row["replica_id"]),
            pop=PopId(row["pop"]),
            node_id=NodeId(row["node_id"]),
            address=row["address"],
            placed_at=row["placed_at"],
            is_away=row["is_away"],
        )
        for spec, row in specs
        if uses_kv_store(spec.engine)
    ]
