"""Prefetches: weights that a node should have before it runs them."""

import asyncpg
import msgspec

from isochrone.wire.ids import Epoch, NodeId
from isochrone.wire.models.model import CatalogModel
from isochrone.wire.peers.assignment import ArtifactPrefetch
from scheduler.decide.cluster import PrefetchTarget
from scheduler.decide.placement import PrefetchDecision
from scheduler.store.events import record_event
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Connection, as_struct
from scheduler.store.readable_rows import RowReader


async def read_prefetches(connection: Connection) -> tuple[PrefetchTarget, ...]:
    """Return every current prefetch."""
    rows = await connection.fetch(
        """
        SELECT node_id, model_id, deployment_id, bytes_per_s, reason,
               held_at IS NOT NULL AS is_held,
               extract(epoch FROM due_at - clock_timestamp())::float8 AS due_s
        FROM prefetch ORDER BY node_id, model_id
        """
    )
    return tuple(as_struct(row, PrefetchTarget) for row in rows)


async def read_node_prefetches(
    connection: Connection, node_id: NodeId
) -> tuple[ArtifactPrefetch, ...]:
    """Return one node's prefetches, the earliest due first.

    Weights that the node already has are included, so that it does not evict them.
    """
    rows = await connection.fetch(
        """
        SELECT model_id, spec, bytes_per_s FROM prefetch JOIN model USING (model_id)
        WHERE node_id = $1 ORDER BY due_at, model_id
        """,
        node_id,
    )
    return RowReader().read_each("model", rows, _prefetch, name="model_id")


def _prefetch(row: asyncpg.Record) -> ArtifactPrefetch:
    return ArtifactPrefetch(
        artifact=msgspec.json.decode(row["spec"], type=CatalogModel).artifact,
        bytes_per_s=row["bytes_per_s"],
    )


async def record_prefetch_changes(
    connection: Connection, epoch: Epoch, decision: PrefetchDecision
) -> None:
    """Store added, arrived and ended prefetches, each with an event; raises EpochLost."""
    await assert_epoch(connection, epoch)
    for target in decision.new:
        await connection.execute(
            """
            INSERT INTO prefetch (node_id, model_id, deployment_id, bytes_per_s, reason, due_at)
            VALUES ($1, $2, $3, $4, $5, clock_timestamp() + make_interval(secs => $6))
            ON CONFLICT DO NOTHING
            """,
            target.node_id,
            target.model_id,
            target.deployment_id,
            target.bytes_per_s,
            target.reason,
            target.due_s,
        )
        await _note(connection, target, "weights.planned", target.reason)
    for target in decision.arrived:
        await connection.execute(
            """
            UPDATE prefetch SET held_at = clock_timestamp()
            WHERE node_id = $1 AND model_id = $2 AND held_at IS NULL
            """,
            target.node_id,
            target.model_id,
        )
        await _note(connection, target, "weights.held", f"{target.due_s:.0f} s before its time")
    for ended in decision.ended:
        await connection.execute(
            "DELETE FROM prefetch WHERE node_id = $1 AND model_id = $2",
            ended.target.node_id,
            ended.target.model_id,
        )
        await _note(connection, ended.target, "weights.over", ended.reason)


async def _note(connection: Connection, target: PrefetchTarget, kind: str, reason: str) -> None:
    await record_event(
        connection,
        actor="scheduler",
        kind=kind,
        subject=target.node_id,
        reason=f"{target.model_id} for {target.deployment_id}: {reason}",
    )
