"""Commits plans: a plan becomes placements if nothing has changed since its input was read."""

from isochrone.wire.ids import Epoch
from scheduler.decide.cluster import PlacementPlan, ReplicaEnding
from scheduler.store.events import record_event
from scheduler.store.fleet.nodes import lock_nodes
from scheduler.store.fleet.placements import add_placement
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Connection


async def commit_plan(connection: Connection, plan: PlacementPlan, epoch: Epoch) -> bool:
    """Write a plan in the caller's transaction; False if the cluster's generation has moved.

    Raises EpochLost. A plan that is not committed is made again from newer state.
    """
    await assert_epoch(connection, epoch)
    # Nodes are locked before the cluster's generation, as in every transaction.
    await lock_nodes(connection, plan.node_ids)
    generation = await connection.fetchval(
        "UPDATE cluster SET generation = generation + 1 WHERE generation = $1 RETURNING generation",
        plan.based_on,
    )
    if generation is None:
        return False
    for start in plan.starts:
        for part in start.parts:
            await add_placement(connection, part.node_id, part.spec, part.reason)
            await record_event(
                connection,
                actor="scheduler",
                kind="replica.placed",
                subject=part.spec.replica_id,
                reason=f"on {part.node_id}: {part.reason}",
            )
    for ending in plan.endings:
        await _end_placement(connection, ending, generation)
    for change in plan.role_changes:
        await connection.execute(
            "UPDATE placement SET role = $2 WHERE replica_id = $1 AND ended_at IS NULL",
            change.replica_id,
            change.role,
        )
        await record_event(
            connection,
            actor="scheduler",
            kind="replica.role",
            subject=change.replica_id,
            reason=f"now {change.role}: {change.reason}",
        )
    await connection.execute(
        "UPDATE node SET assigned = $2 WHERE node_id = ANY($1::text[])", plan.node_ids, generation
    )
    return True


async def _end_placement(connection: Connection, ending: ReplicaEnding, generation: int) -> None:
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
