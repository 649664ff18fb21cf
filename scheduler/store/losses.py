"""When a node was lost and when it was back: kept beside the node, told as events once each."""

from collections.abc import Sequence
from typing import NamedTuple

from isochrone.wire.ids import Epoch, NodeId, PopId
from scheduler.decide.cluster import Node
from scheduler.decide.liveness import Heard
from scheduler.store.lease import assert_epoch
from scheduler.store.nodes import lock_nodes
from scheduler.store.pool import Connection


class Silence(NamedTuple):
    """A node as far as its silence goes, and for how long it has been noted lost, if it is."""

    node: Node
    lost_for_s: float | None


async def read_silences(connection: Connection, heard: Heard) -> tuple[Silence, ...]:
    """Return every node that is not revoked, as this process or else the store has heard it.

    A node last seen in a time to come, by a clock put back since, is as silent as that is far.
    """
    rows = await connection.fetch(
        """
        SELECT node_id, pop,
            abs(extract(epoch FROM clock_timestamp() - coalesce(last_seen_at, created_at)))::float8
                AS silent_s,
            extract(epoch FROM clock_timestamp() - lost_at)::float8 AS lost_for_s
        FROM node WHERE NOT revoked ORDER BY node_id
        """
    )
    return tuple(
        Silence(
            Node(
                node_id=NodeId(row["node_id"]),
                pop=PopId(row["pop"]),
                address="",
                devices=(),
                silent_s=heard.silent_s.get(row["node_id"], row["silent_s"]),
                back_s=heard.back_s.get(row["node_id"]),
            ),
            row["lost_for_s"],
        )
        for row in rows
    )


async def record_losses(
    connection: Connection, epoch: Epoch, lost: Sequence[Silence], back: Sequence[Silence]
) -> None:
    """Note who is lost and who is back, each with its event, in the caller's transaction."""
    await assert_epoch(connection, epoch)
    await lock_nodes(connection, [silence.node.node_id for silence in (*lost, *back)])
    await connection.execute(
        "UPDATE node SET lost_at = clock_timestamp() WHERE node_id = ANY($1::text[])",
        [silence.node.node_id for silence in lost],
    )
    await connection.execute(
        "UPDATE node SET lost_at = NULL WHERE node_id = ANY($1::text[])",
        [silence.node.node_id for silence in back],
    )
    told = [
        ("node.lost", node.node_id, f"in {node.pop}: silent for {node.silent_s:.0f} s")
        for node, _ in lost
    ] + [
        ("node.back", node.node_id, f"in {node.pop}: heard again, lost for {lost_for_s or 0:.0f} s")
        for node, lost_for_s in back
    ]
    await connection.executemany(
        "INSERT INTO event (actor, kind, subject, reason) VALUES ('scheduler', $1, $2, $3)", told
    )
