"""Rollouts and their measurements. Every change of a rollout is guarded by its etag."""

from collections.abc import Sequence
from operator import attrgetter

import asyncpg
import msgspec

from isochrone.wire.ids import PopId
from isochrone.wire.models.model import Deployment
from isochrone.wire.peers.rollout import RolloutSpec, RolloutState
from isochrone.wire.peers.usage import Moments, TrialRow
from scheduler.decide.rollout import Arm, Rollout, StartCounts, Stratum
from scheduler.store.catalogue import bump_generation
from scheduler.store.deployments import SAME_VERSION, lock_deployment
from scheduler.store.pool import Connection, affected_rows, as_json, as_struct, fetch_one
from scheduler.store.readable_rows import RowReader

_ROLLOUT = """
SELECT rollout_id, r.deployment_id, from_version, to_version, spec, state, step, reason, r.etag,
       greatest(0, extract(epoch FROM clock_timestamp() - step_since))::float8 AS step_age_s
FROM rollout r
"""


async def active_rollouts(
    connection: Connection, reader: RowReader | None = None
) -> tuple[Rollout, ...]:
    """Return the running and paused rollouts of deployments that are not deleted."""
    rows = await connection.fetch(
        f"{_ROLLOUT} JOIN deployment d USING (deployment_id)"
        " WHERE state IN ('running', 'paused') AND d.deleted_at IS NULL ORDER BY r.deployment_id"
    )
    reader = reader or RowReader()
    return reader.read_table(
        "rollout", rows, _rollout, name="rollout_id", deployment="deployment_id"
    )


async def get_rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    """Return one rollout."""
    row = await connection.fetchrow(f"{_ROLLOUT} WHERE rollout_id = $1", rollout_id)
    return _rollout(row) if row else None


async def list_rollouts(
    connection: Connection, after: str, limit: int, deployment_id: str | None = None
) -> list[Rollout]:
    """Return rollouts in the order of their ids, of one deployment or of all."""
    rows = await connection.fetch(
        f"{_ROLLOUT} WHERE rollout_id > $1 AND ($3::text IS NULL OR r.deployment_id = $3)"
        " ORDER BY rollout_id LIMIT $2",
        after,
        limit,
        deployment_id,
    )
    return [_rollout(row) for row in rows]


async def conflicts_with_rollout(connection: Connection, deployment: Deployment) -> bool:
    """Return whether this would make a new version of a deployment during an active rollout."""
    return bool(
        await connection.fetchval(
            f"""
            SELECT EXISTS (
                SELECT FROM rollout JOIN deployment d USING (deployment_id)
                WHERE deployment_id = $1 AND state IN ('running', 'paused') AND NOT {SAME_VERSION})
            """,  # noqa: S608 - constants only
            deployment.deployment_id,
            deployment.model_id,
            as_json(deployment.engine),
            as_json(deployment.policy),
        )
    )


async def add_rollout(connection: Connection, rollout: Rollout) -> bool:
    """Add a rollout; False if the deployment already has an active one."""
    try:
        async with connection.transaction():
            await connection.execute(
                """
                INSERT INTO rollout (rollout_id, deployment_id, from_version, to_version, spec)
                VALUES ($1, $2, $3, $4, $5)
                """,
                rollout.rollout_id,
                rollout.deployment_id,
                rollout.from_version,
                rollout.to_version,
                as_json(rollout.spec),
            )
    except asyncpg.UniqueViolationError:
        return False
    return True


async def write_rollout(connection: Connection, before: Rollout, after: Rollout) -> bool:
    """Store a rollout's new state; False if it has changed since it was read.

    When the rollout is done, its deployment gets the new version in the same transaction.
    """
    await lock_deployment(connection, before.deployment_id)
    done = await connection.execute(
        """
        UPDATE rollout SET state = $3, step = $4, reason = $5, etag = $6,
            step_since = CASE WHEN $7 THEN clock_timestamp() ELSE step_since END
        WHERE rollout_id = $1 AND etag = $2
        """,
        before.rollout_id,
        before.etag,
        after.state.value,
        after.step,
        after.reason,
        after.etag,
        after.step_age_s == 0.0 and after.state is RolloutState.RUNNING,
    )
    if not affected_rows(done):
        return False
    if after.state is RolloutState.DONE:
        await connection.execute(
            """
            UPDATE deployment SET version = $2, model_id = $3, engine = $4, etag = etag + 1
            WHERE deployment_id = $1
            """,
            after.deployment_id,
            after.to_version,
            after.spec.model_id,
            as_json(after.spec.engine),
        )
    await bump_generation(connection)
    return True


async def record_trials(connection: Connection, rows: Sequence[TrialRow]) -> None:
    """Add a router's measurements to the current steps of active rollouts."""
    await connection.executemany(
        """
        INSERT INTO rollout_trial AS t
        SELECT rollout_id, step, $2::int, $3::text, $4::text, $5::bigint, $6::bigint, $7::bigint,
               $8::float8, $9::float8, $10::bigint, $11::float8, $12::float8
        FROM rollout WHERE deployment_id = $1 AND state IN ('running', 'paused')
                       AND $2 IN (from_version, to_version)
        ON CONFLICT (rollout_id, step, version, pop, asked_pop) DO UPDATE SET
            attempts = t.attempts + excluded.attempts,
            failures = t.failures + excluded.failures,
            ttft_count = t.ttft_count + excluded.ttft_count,
            ttft_total = t.ttft_total + excluded.ttft_total,
            ttft_squares = t.ttft_squares + excluded.ttft_squares,
            itl_count = t.itl_count + excluded.itl_count,
            itl_total = t.itl_total + excluded.itl_total,
            itl_squares = t.itl_squares + excluded.itl_squares
        """,
        map(
            attrgetter(
                *("deployment_id", "version", "pop", "asked_pop", "attempts", "failures"),
                *("ttft.count", "ttft.total", "ttft.squares"),
                *("itl.count", "itl.total", "itl.squares"),
            ),
            rows,
        ),
    )


async def read_strata(connection: Connection, rollout: Rollout) -> tuple[Stratum, ...]:
    """Return the measurements of both versions in the current step, by PoP."""
    rows = await connection.fetch(
        "SELECT * FROM rollout_trial WHERE rollout_id = $1 AND step = $2 ORDER BY pop, asked_pop",
        rollout.rollout_id,
        rollout.step,
    )
    arms: dict[tuple[PopId, PopId], dict[int, Arm]] = {}
    for row in rows:
        arms.setdefault((row["pop"], row["asked_pop"]), {})[row["version"]] = _arm(row)
    return tuple(
        Stratum(
            pop=pop,
            asked_pop=asked_pop,
            old=versions.get(rollout.from_version, Arm()),
            new=versions.get(rollout.to_version, Arm()),
        )
        for (pop, asked_pop), versions in sorted(arms.items())
    )


async def read_starts(connection: Connection, rollout: Rollout) -> StartCounts:
    """Return how many replicas of the new version exist, are warm and have failed."""
    row = await fetch_one(
        connection,
        """
        SELECT count(*) FILTER (WHERE state = 'warm' AND leader_id IS NULL) AS warm,
               -- A replica over several nodes fails once, however many of its parts do.
               count(DISTINCT coalesce(leader_id, replica_id)) FILTER (WHERE state = 'failed')
                   AS failed, count(*) AS placed
        FROM placement WHERE deployment_id = $1 AND version = $2
            AND (released_at IS NULL OR (state = 'failed' AND restarts > 0))
        """,
        rollout.deployment_id,
        rollout.to_version,
    )
    return StartCounts(*row)


def _arm(row: asyncpg.Record) -> Arm:
    return as_struct(
        row,
        Arm,
        ttft=Moments(count=row["ttft_count"], total=row["ttft_total"], squares=row["ttft_squares"]),
        itl=Moments(count=row["itl_count"], total=row["itl_total"], squares=row["itl_squares"]),
    )


def _rollout(row: asyncpg.Record) -> Rollout:
    return as_struct(row, Rollout, spec=msgspec.json.decode(row["spec"], type=RolloutSpec))
