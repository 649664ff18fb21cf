"""Deployments as operators define them. A deleted row is kept while usage refers to it."""

from typing import Final

import asyncpg
import msgspec

from isochrone.wire.admin import DeploymentView
from isochrone.wire.models.model import Deployment, Deprecation, EngineSettings, PlacementPolicy
from scheduler.store.catalogue import EtagMoved
from scheduler.store.pool import Connection, affected_rows, as_json, as_struct

_DEPLOYMENTS: Final = """
SELECT deployment_id, name, model_id, version, engine, policy, deprecation, etag, (
    SELECT coalesce(json_object_agg(state, replicas), '{}') FROM (
        SELECT CASE WHEN ended_at IS NULL THEN state ELSE 'draining' END AS state,
               count(*) AS replicas
        FROM placement p WHERE p.deployment_id = d.deployment_id AND released_at IS NULL
            AND leader_id IS NULL
        GROUP BY 1
    ) AS counted
) AS replicas
FROM deployment d WHERE deleted_at IS NULL
"""

SAME_VERSION: Final = """(
    d.model_id = $2 AND d.engine = $3::jsonb
    AND coalesce(d.policy->'overcommit', '1') = $4::jsonb->'overcommit'
    AND coalesce(d.policy->'awake_min', '0') = $4::jsonb->'awake_min'
)"""
"""Whether a deployment with this model, engine and policy keeps its version, and so its replicas.
They are placed either to sleep or to stay awake."""


async def list_deployments(connection: Connection, after: str, limit: int) -> list[DeploymentView]:
    """Return deployments in the order of their ids."""
    rows = await connection.fetch(
        f"{_DEPLOYMENTS} AND deployment_id > $1 ORDER BY deployment_id LIMIT $2", after, limit
    )
    return [_deployment(row) for row in rows]


async def get_deployment(connection: Connection, deployment_id: str) -> DeploymentView | None:
    """Return one deployment."""
    row = await connection.fetchrow(f"{_DEPLOYMENTS} AND deployment_id = $1", deployment_id)
    return _deployment(row) if row else None


async def get_deployment_by_name(connection: Connection, name: str) -> DeploymentView | None:
    """Return the deployment that clients call `name`."""
    row = await connection.fetchrow(f"{_DEPLOYMENTS} AND name = $1", name)
    return _deployment(row) if row else None


async def find_deployment(connection: Connection, id_or_name: str) -> DeploymentView | None:
    """Return a deployment by its id or, if none has this id, by what clients call it."""
    found = await get_deployment(connection, id_or_name)
    return found or await get_deployment_by_name(connection, id_or_name)


async def deployment_names(connection: Connection) -> frozenset[str]:
    """Return what clients call the deployments."""
    rows = await connection.fetch("SELECT name FROM deployment WHERE deleted_at IS NULL")
    return frozenset(row["name"] for row in rows)


async def lock_deployment(connection: Connection, deployment_id: str) -> None:
    """Lock a deployment until the transaction ends: no other may change it or begin a rollout.

    A transaction that also locks the rollout's row takes this lock first.
    """
    await connection.execute(
        "SELECT FROM deployment WHERE deployment_id = $1 FOR NO KEY UPDATE", deployment_id
    )


async def next_version(connection: Connection, deployment_id: str) -> int:
    """Return a version number that this deployment never had, reverted rollouts included."""
    version: int = await connection.fetchval(
        """
        SELECT 1 + coalesce(greatest(
            (SELECT version FROM deployment WHERE deployment_id = $1),
            (SELECT max(to_version) FROM rollout WHERE deployment_id = $1)), 0)
        """,
        deployment_id,
    )
    return version


async def add_deployment(connection: Connection, deployment: Deployment) -> bool:
    """Add a deployment; False if its id or its name is taken.

    The id of a deleted deployment can be used again: its last replicas are of an older version.
    """
    try:
        async with connection.transaction():
            done = await connection.execute(
                """
                INSERT INTO deployment AS d
                    (deployment_id, name, model_id, version, engine, policy, deprecation)
                VALUES ($1, $2, $3, $4, $5, $6, $7)
                ON CONFLICT (deployment_id) DO UPDATE SET name = $2, model_id = $3, version = $4,
                    engine = $5, policy = $6, deprecation = $7, etag = d.etag + 1, deleted_at = NULL
                    WHERE d.deleted_at IS NOT NULL
                """,
                deployment.deployment_id,
                deployment.name,
                deployment.model_id,
                await next_version(connection, deployment.deployment_id),
                as_json(deployment.engine),
                as_json(deployment.policy),
                as_json(deployment.deprecation) if deployment.deprecation else None,
            )
    except asyncpg.UniqueViolationError:
        return False
    return affected_rows(done) > 0


async def change_deployment(
    connection: Connection, deployment: Deployment, etag: int | None
) -> bool:
    """Change a locked deployment. Raises EtagMoved.

    What SAME_VERSION does not allow makes a new version. Return False if the name belongs to
    another deployment.
    """
    try:
        async with connection.transaction():
            done = await connection.execute(
                f"""
                UPDATE deployment d SET name = $5, model_id = $2, engine = $3, policy = $4,
                    version = CASE WHEN {SAME_VERSION} THEN version ELSE $7 END,
                    deprecation = $8, etag = etag + 1
                WHERE deployment_id = $1 AND deleted_at IS NULL
                  AND ($6::bigint IS NULL OR etag = $6)
                """,  # noqa: S608 - constants only
                deployment.deployment_id,
                deployment.model_id,
                as_json(deployment.engine),
                as_json(deployment.policy),
                deployment.name,
                etag,
                await next_version(connection, deployment.deployment_id),
                as_json(deployment.deprecation) if deployment.deprecation else None,
            )
    except asyncpg.UniqueViolationError:
        return False
    if not affected_rows(done):
        raise EtagMoved(deployment.deployment_id)
    return True


async def bump_versions(connection: Connection, model_id: str) -> str:
    """Give all deployments of a model a new version, because its files have changed.

    Return the id of a deployment whose active rollout prevents this, and change nothing; empty if
    there is none.
    """
    await connection.execute(
        """
        SELECT FROM deployment d WHERE model_id = $1 OR EXISTS (
            SELECT FROM rollout r WHERE r.deployment_id = d.deployment_id AND bound_for = $1)
        ORDER BY deployment_id FOR NO KEY UPDATE
        """,
        model_id,
    )
    rolling: str | None = await connection.fetchval(
        """
        SELECT r.deployment_id FROM rollout r JOIN deployment d USING (deployment_id)
        WHERE state IN ('running', 'paused') AND $1 IN (model_id, bound_for) LIMIT 1
        """,
        model_id,
    )
    if rolling is None:
        await connection.execute(
            """
            UPDATE deployment d SET etag = etag + 1, version = 1 + greatest(version,
                (SELECT max(to_version) FROM rollout r WHERE r.deployment_id = d.deployment_id))
            WHERE model_id = $1 AND deleted_at IS NULL
            """,
            model_id,
        )
    return rolling or ""


async def delete_deployment(connection: Connection, deployment_id: str, etag: int | None) -> None:
    """Mark a deployment deleted and abort its rollout; its replicas drain. Raises EtagMoved."""
    done = await connection.execute(
        """
        UPDATE deployment SET deleted_at = clock_timestamp(), etag = etag + 1
        WHERE deployment_id = $1 AND deleted_at IS NULL AND ($2::bigint IS NULL OR etag = $2)
        """,
        deployment_id,
        etag,
    )
    if not affected_rows(done):
        raise EtagMoved(deployment_id)
    await connection.execute(
        """
        UPDATE rollout SET state = 'aborted', reason = 'the deployment was deleted', etag = etag + 1
        WHERE deployment_id = $1 AND state IN ('running', 'paused')
        """,
        deployment_id,
    )


def read_deprecation(column: str | None) -> Deprecation | None:
    """Return the value of the column `deprecation`."""
    return msgspec.json.decode(column, type=Deprecation) if column else None


def _deployment(row: asyncpg.Record) -> DeploymentView:
    return as_struct(
        row,
        DeploymentView,
        engine=msgspec.json.decode(row["engine"], type=EngineSettings),
        policy=msgspec.json.decode(row["policy"], type=PlacementPolicy),
        deprecation=read_deprecation(row["deprecation"]),
        replicas=msgspec.json.decode(row["replicas"]),
        unmet=(),
    )
