"""When nodes were lost and came back: a column of the node, and one event for each change."""

from collections.abc import Sequence

from isochrone.wire.ids import Epoch, NodeId
from scheduler.decide.cluster import FleetNode
from scheduler.store.fleet.nodes import lock_nodes
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Connection


async def read_lost_nodes(connection: Connection) -> dict[NodeId, float]:
    """Return the nodes that are recorded as lost, and for how many seconds."""
    rows = await connection.fetch(
        """
        SELECT node_id, extract(epoch FROM clock_timestamp() - lost_at)::float8 AS lost_for_s
        FROM node WHERE lost_at IS NOT NULL
        """
    )
    return {row["node_id"]: row["lost_for_s"] for row in rows}


async def record_node_losses(
    connection: Connection,
    epoch: Epoch,
    lost: Sequence[FleetNode],
    back: Sequence[tuple[FleetNode, float]],
) -> None:
    """Record nodes as lost, and as back after this many seconds, each with an event.

    Runs in the caller's transaction; raises EpochLost.
    """
    await assert_epoch(connection, epoch)
    lost_ids, back_ids = [node.node_id for node in lost], [node.node_id for node, _ in back]
    await lock_nodes(connection, [*lost_ids, *back_ids])
    await connection.execute(
        "UPDATE node SET lost_at = clock_timestamp() WHERE node_id = ANY($1::text[])", lost_ids
    )
    await connection.execute(
        "UPDATE node SET lost_at = NULL WHERE node_id = ANY($1::text[])", back_ids
    )
    events = [
        ("node.lost", node.node_id, f"in {node.pop}: silent for {node.silent_s:.0f} s")
        for node in lost
    ] + [
        ("node.back", node.node_id, f"in {node.pop}: heard again, lost for {lost_for_s:.0f} s")
        for node, lost_for_s in back
    ]
    await connection.executemany(
        "INSERT INTO event (actor, kind, subject, reason) VALUES ('scheduler', $1, $2, $3)", events
    )
