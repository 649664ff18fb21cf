"""Adoption: a running replica that the store does not know is added to it, and not stopped.

A database that was restored from a backup lacks the replicas and deployments made since. A report
carries each replica's whole spec, so their rows can be made again. Only replicas with this
cluster's seal are adopted (`decide/membership/placement_seal.py`).

The backup may give the same memory to a replica that has ended since. The running replica stays,
and the placement of the ended one, which its node does not have, is released for it. The node
cannot be starting that one, because it refuses a replica that does not fit beside one that its
assignment does not name (nodeagent/decide/replicas/reconcile.py).
"""

from collections.abc import Callable, Collection

import asyncpg

from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.models.model import CatalogModel
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.report import ReplicaReport, ReplicaState
from scheduler.store.events import record_event
from scheduler.store.fleet.placements import add_placement
from scheduler.store.pool import Connection, affected_rows, as_json, storable_text

NOT_RUNNING = (ReplicaState.STOPPED, ReplicaState.FAILED)

PLACEMENT_REFUSED = (
    asyncpg.CheckViolationError,
    asyncpg.UniqueViolationError,
    asyncpg.ForeignKeyViolationError,
)
"""The device's memory is reserved, the replica's id is taken, or the device no longer exists."""


SealCheck = Callable[[NodeId, ReplicaSpec], bool]
"""Says whether a scheduler of this cluster once placed this replica on this node."""


async def adopt(
    connection: Connection,
    node_id: NodeId,
    replica: ReplicaReport,
    present: Collection[ReplicaId],
    has_valid_seal: SealCheck,
) -> int:
    """Add one unknown replica with its deployment and model; return 1, or 0 if it is not adopted.

    `present` are the replicas that the node has. A replica that cannot be adopted goes on running,
    and an event records why.
    """
    if replica.state in NOT_RUNNING:
        return 0
    spec = replica.spec
    if not has_valid_seal(node_id, spec):
        # Once for each node: it may report any number of replica ids.
        reason = f"{spec.replica_id} has no seal of this cluster for this node"
        await _record_refusal_once(connection, node_id, node_id, reason)
        return 0
    # A trigger sums a device's placements for each new one. Its cached query plan, made while the
    # tables were empty, would scan all placements each time.
    await connection.execute("SET LOCAL plan_cache_mode = force_custom_plan")
    try:
        try:
            await _add(connection, node_id, replica)
        except asyncpg.CheckViolationError:
            async with connection.transaction():
                await _release_absent(connection, node_id, spec, present)
                await _add(connection, node_id, replica)
    except PLACEMENT_REFUSED as error:
        await _record_refusal_once(connection, node_id, spec.replica_id, str(error)[:500])
        return 0
    await record_event(
        connection, actor=f"node:{node_id}", kind="replica.adopted", subject=spec.replica_id
    )
    return 1


async def _add(connection: Connection, node_id: NodeId, replica: ReplicaReport) -> None:
    async with connection.transaction():
        await _ensure_deployment(connection, replica)
        reason = "adopted: the node ran it and the store did not know it"
        state_reason = storable_text(replica.reason)
        await add_placement(connection, node_id, replica.spec, reason, replica.state, state_reason)


async def _release_absent(
    connection: Connection, node_id: NodeId, spec: ReplicaSpec, present: Collection[ReplicaId]
) -> None:
    """Release what the node does not have of the devices of a replica that it runs.

    Replicas over several nodes are left to the planner, which ends all parts together.
    """
    reason = f"the node does not have it, and runs {spec.replica_id} in its memory"
    rows = await connection.fetch(
        """
        UPDATE placement SET released_at = clock_timestamp(), state = 'stopped',
            ended_at = coalesce(ended_at, clock_timestamp()),
            ended_generation = coalesce(ended_generation, (SELECT generation FROM cluster)),
            ended_reason = coalesce(ended_reason, $4)
        WHERE node_id = $1 AND released_at IS NULL AND replica_id <> ALL($3::text[])
          AND spec->>'group' IS NULL AND replica_id IN (
            SELECT replica_id FROM placement_device
            WHERE node_id = $1 AND device_id = ANY($2::text[]))
        RETURNING replica_id
        """,
        node_id,
        list(spec.device_ids),
        list(present),
        reason,
    )
    for row in rows:
        await record_event(
            connection,
            actor=f"node:{node_id}",
            kind="replica.ended",
            subject=row["replica_id"],
            reason=f"on {node_id}: {reason}",
        )


async def _record_refusal_once(
    connection: Connection, node_id: NodeId, subject: str, reason: str
) -> None:
    """Record a refusal the first time only: the node reports the same replica every few seconds."""
    recorded = await connection.fetchval(
        "SELECT 1 FROM event WHERE subject = $1 AND kind = 'replica.not_adopted' LIMIT 1",
        subject,
    )
    if recorded is None:
        await record_event(
            connection,
            actor=f"node:{node_id}",
            kind="replica.not_adopted",
            subject=subject,
            reason=reason,
        )


async def _ensure_deployment(connection: Connection, replica: ReplicaReport) -> None:
    spec = replica.spec
    model = CatalogModel(
        model_id=spec.model_id,
        architecture="unknown",
        artifact=spec.artifact,
        context_tokens=spec.context_tokens,
        weights_bytes=max(0, spec.memory_bytes - spec.engine.kv_memory_bytes),
    )
    await connection.execute(
        "INSERT INTO model (model_id, spec) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        spec.model_id,
        as_json(model),
    )
    status = await connection.execute(
        """
        INSERT INTO deployment (deployment_id, name, model_id, version, engine, policy)
        VALUES ($1, $2, $3, $4, $5, '{}') ON CONFLICT (deployment_id) DO NOTHING
        """,
        spec.deployment_id,
        spec.name,
        spec.model_id,
        spec.version,
        as_json(spec.engine),
    )
    if affected_rows(status):
        await record_event(
            connection,
            actor="scheduler",
            kind="deployment.recreated",
            subject=DeploymentId(spec.deployment_id),
            reason="a running replica belongs to it and the store did not know it",
        )
