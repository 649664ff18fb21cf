"""Adoption: a replica that runs but is not in the store is taken in, never killed.

This is what a database restored from an hour ago meets: the same cluster, but replicas, and even
deployments, made since then are unknown to it. A report carries each replica's whole spec, so the
store can be made to know them again. Only what bears our seal is taken in: see decide/claims.py.
"""

from collections.abc import Callable

import asyncpg

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.ids import DeploymentId, NodeId
from isochrone.wire.model import Model
from isochrone.wire.report import ReplicaReport, ReplicaState
from scheduler.store.events import record_event
from scheduler.store.placements import add_placement
from scheduler.store.pool import Connection, affected_rows, as_json, storable_text

GONE = (ReplicaState.STOPPED, ReplicaState.FAILED)

NO_SEAT = (
    asyncpg.CheckViolationError,
    asyncpg.UniqueViolationError,
    asyncpg.ForeignKeyViolationError,
)
"""Its memory is promised, its name is taken, or its device is one the node has no more."""


SealCheck = Callable[[NodeId, ReplicaSpec], bool]
"""Whether a replica was once seated on this node by a scheduler of this cluster."""


async def adopt(
    connection: Connection, node_id: NodeId, replica: ReplicaReport, believes: SealCheck
) -> int:
    """Take in one unknown replica with its deployment and model; return 1, or 0 if it cannot be.

    What cannot be adopted (a device is promised to another, or gone) goes on running and is noted.
    """
    if replica.state in GONE:
        return 0
    spec = replica.spec
    if not believes(node_id, spec):
        # Once a node: it may name as many as it likes.
        reason = f"{spec.replica_id} bears no seal of this cluster for a seat on this node"
        await _note_once(connection, node_id, node_id, reason)
        return 0
    # What a device holds is added up for each seat. A plan kept from when it held nothing reads all
    # placements for each of them.
    await connection.execute("SET LOCAL plan_cache_mode = force_custom_plan")
    try:
        async with connection.transaction():
            await _ensure_deployment(connection, replica)
            why = "adopted: the node ran it and the store did not know it"
            said = storable_text(replica.reason)
            await add_placement(connection, node_id, spec, why, replica.state, said)
    except NO_SEAT as error:
        await _note_once(connection, node_id, spec.replica_id, str(error)[:500])
        return 0
    await record_event(
        connection, actor=f"node:{node_id}", kind="replica.adopted", subject=spec.replica_id
    )
    return 1


async def _note_once(connection: Connection, node_id: NodeId, subject: str, reason: str) -> None:
    """Record a refusal the first time: the node reports the same replica every few seconds."""
    noted = await connection.fetchval(
        "SELECT 1 FROM event WHERE subject = $1 AND kind = 'replica.not_adopted' LIMIT 1",
        subject,
    )
    if noted is None:
        await record_event(
            connection,
            actor=f"node:{node_id}",
            kind="replica.not_adopted",
            subject=subject,
            reason=reason,
        )


async def _ensure_deployment(connection: Connection, replica: ReplicaReport) -> None:
    spec = replica.spec
    model = Model(
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
    made = await connection.execute(
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
    if affected_rows(made):
        await record_event(
            connection,
            actor="scheduler",
            kind="deployment.recreated",
            subject=DeploymentId(spec.deployment_id),
            reason="a running replica belongs to it and the store did not know it",
        )
