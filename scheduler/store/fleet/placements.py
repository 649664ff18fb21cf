"""Adds placements: of a plan, or of an adopted replica."""

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.report import ReplicaState
from scheduler.store.pool import Connection, as_json


async def add_placement(
    connection: Connection,
    node_id: NodeId,
    spec: ReplicaSpec,
    reason: str,
    state: ReplicaState = ReplicaState.WANTED,
    state_reason: str = "",
) -> None:
    """Add a placement and the memory it takes of each device, at the cluster's generation."""
    await connection.execute(
        """
        INSERT INTO placement (replica_id, deployment_id, version, node_id, role, memory_bytes,
                               spec, reason, placed_generation, state, state_reason)
        SELECT $1, $2, $3, $4, $5, $6, $7, $8, generation, $9, $10 FROM cluster
        """,
        spec.replica_id,
        spec.deployment_id,
        spec.version,
        node_id,
        spec.role,
        spec.planned_bytes,
        as_json(spec),
        reason,
        state,
        state_reason,
    )
    await connection.executemany(
        """
        INSERT INTO placement_device (replica_id, node_id, device_id, memory_bytes)
        VALUES ($1, $2, $3, $4)
        """,
        [(spec.replica_id, node_id, d, spec.planned_bytes) for d in spec.device_ids],
    )
