"""commit_plan(): the plan becomes placements, if nothing moved since its picture was read."""

from isochrone.wire.ids import Epoch
from scheduler.decide.cluster import Ending, Plan, Start
from scheduler.store.events import record_event
from scheduler.store.lease import assert_epoch
from scheduler.store.nodes import lock_nodes
from scheduler.store.pool import Connection, as_json


async def commit_plan(connection: Connection, plan: Plan, epoch: Epoch) -> bool:
    """Write the moves in the caller's transaction; False where the ground has moved.

    Nothing is merged by hand: the next turn reads again.
    """
    await assert_epoch(connection, epoch)
    # Nodes before the cluster's generation, as everybody locks them.
    await lock_nodes(connection, plan.node_ids)
    generation = await connection.fetchval(
        "UPDATE cluster SET generation = generation + 1 WHERE generation = $1 RETURNING generation",
        plan.based_on,
    )
    if generation is None:
        return False
    for start in plan.starts:
        for part in start.parts:
            await _seat(connection, part, generation)
    for ending in plan.endings:
        await _entomb(connection, ending, generation)
    await connection.execute(
        "UPDATE node SET assigned = $2 WHERE node_id = ANY($1::text[])", plan.node_ids, generation
    )
    return True


async def _seat(connection: Connection, start: Start, generation: int) -> None:
    spec = start.spec
    await connection.execute(
        """
        INSERT INTO placement (replica_id, deployment_id, version, node_id, role, memory_bytes,
                               spec, reason, placed_generation)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
        """,
        spec.replica_id,
        spec.deployment_id,
        spec.version,
        start.node_id,
        spec.role.value,
        spec.memory_bytes,
        as_json(spec),
        start.reason,
        generation,
    )
    await connection.executemany(
        """
        INSERT INTO placement_device (replica_id, node_id, device_id, memory_bytes)
        VALUES ($1, $2, $3, $4)
        """,
        [(spec.replica_id, start.node_id, d, spec.memory_bytes) for d in spec.device_ids],
    )
    await record_event(
        connection,
        actor="scheduler",
        kind="replica.placed",
        subject=spec.replica_id,
        reason=f"on {start.node_id}: {start.reason}",
    )


async def _entomb(connection: Connection, ending: Ending, generation: int) -> None:
    await connection.execute(
        """
        UPDATE placement SET ended_at = clock_timestamp(), ended_generation = $2,
                             ended_reason = $3, drain_timeout_s = $4
        WHERE (replica_id = $1 OR leader_id = $1) AND released_at IS NULL AND ended_at IS NULL
        """,
        ending.replica_id,
        generation,
        ending.reason,
        ending.drain_timeout_s,
    )
    await record_event(
        connection,
        actor="scheduler",
        kind="replica.ended",
        subject=ending.replica_id,
        reason=f"on {ending.node_id}: {ending.reason}",
    )
