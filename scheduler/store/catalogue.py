"""Rows that operators change (PoPs, models) and read (nodes, routers, placements)."""

from typing import Final

import asyncpg
import msgspec

from isochrone.wire.admin import (
    ModelView,
    NodeView,
    PlacementView,
    PopBody,
    PopView,
    RouterView,
)
from isochrone.wire.models.model import CatalogModel
from isochrone.wire.peers.report import NodeDevice
from scheduler.store.pool import Connection, as_json, as_struct


class EtagMoved(Exception):
    """The row does not exist or has changed since it was read."""


class StillUsed(Exception):
    """Another table refers to the row; the message names it."""


async def bump_generation(connection: Connection) -> None:
    """Raise the cluster's generation, so that no plan made before can be committed."""
    await connection.execute("UPDATE cluster SET generation = generation + 1")


async def list_pops(connection: Connection, after: str, limit: int) -> list[PopView]:
    """Return PoPs in the order of their ids."""
    rows = await connection.fetch(
        "SELECT * FROM pop WHERE pop > $1 ORDER BY pop LIMIT $2", after, limit
    )
    return [as_struct(row, PopView) for row in rows]


async def get_pop(connection: Connection, pop: str) -> PopView | None:
    """Return one PoP."""
    row = await connection.fetchrow("SELECT * FROM pop WHERE pop = $1", pop)
    return as_struct(row, PopView) if row else None


async def put_pop(connection: Connection, pop: str, body: PopBody, etag: int | None) -> PopView:
    """Create or change a PoP; raises EtagMoved."""
    row = await connection.fetchrow(
        """
        INSERT INTO pop AS p (pop, city, country, latitude, longitude)
        SELECT $1, $2, $3, $4, $5 WHERE $6::bigint IS NULL OR EXISTS
            (SELECT 1 FROM pop WHERE pop = $1)
        ON CONFLICT (pop) DO UPDATE
            SET city = $2, country = $3, latitude = $4, longitude = $5, etag = p.etag + 1
            WHERE $6::bigint IS NULL OR p.etag = $6
        RETURNING *
        """,
        pop,
        body.city,
        body.country,
        body.latitude,
        body.longitude,
        etag,
    )
    if row is None:
        raise EtagMoved(pop)
    return as_struct(row, PopView)


_DEPENDENT_DELETES: Final = {
    "pop": "DELETE FROM join_token WHERE pop = $1",
    "node": """
        DELETE FROM placement p USING node n
        WHERE n.node_id = $1 AND p.node_id = $1 AND (released_at IS NOT NULL OR n.revoked)
    """,
    "model": """
        WITH gone AS (
            SELECT deployment_id FROM deployment d WHERE model_id = $1 AND deleted_at IS NOT NULL
            AND NOT EXISTS (SELECT FROM placement p
                            WHERE p.deployment_id = d.deployment_id AND released_at IS NULL)
        ), past AS (DELETE FROM placement p USING gone WHERE p.deployment_id = gone.deployment_id)
        DELETE FROM deployment d USING gone WHERE d.deployment_id = gone.deployment_id
    """,
}
"""Rows that are deleted first: they are historical, or useless without the row.

A revoked node's placements are among them, because it will never report that they have ended.
"""

_MODEL_USERS: Final = """
SELECT deployment_id FROM deployment WHERE model_id = $1 ORDER BY deployment_id LIMIT 8
"""

_STILL_USED_HINTS: Final = {
    "node": (
        "; drain it and wait until its replicas have ended, or revoke it if it will not be back"
    ),
    "pop": "; `isochrone nodes list` and `isochrone routers list` show those of this PoP",
}
"""Advice on how to remove dependent rows, where it is not obvious."""


async def delete_row(connection: Connection, table: str, name: str, etag: int | None) -> bool:
    """Delete one row; False if it does not exist; raises EtagMoved or StillUsed."""
    column = "pop" if table == "pop" else f"{table}_id"
    # Routers cannot be changed, so their table has no ETag.
    etag_column = "1" if table == "router" else "etag"
    current = await connection.fetchval(
        f"SELECT {etag_column} FROM {table} WHERE {column} = $1 FOR UPDATE",  # noqa: S608
        name,
    )
    if current is None:
        return False
    if etag is not None and etag != current:
        raise EtagMoved(name)
    try:
        async with connection.transaction():
            if table in _DEPENDENT_DELETES:
                await connection.execute(_DEPENDENT_DELETES[table], name)
            await connection.execute(f"DELETE FROM {table} WHERE {column} = $1", name)  # noqa: S608
    except asyncpg.ForeignKeyViolationError as error:
        users = ""
        if table == "model" and error.table_name == "deployment":
            rows = await connection.fetch(_MODEL_USERS, name)
            users = f" ({', '.join([row['deployment_id'] for row in rows])})"
        raise StillUsed(
            f"cannot delete {table} {name}: {error.table_name or 'another table'}{users} depends"
            f" on it{_STILL_USED_HINTS.get(table, '')}"
        ) from error
    return True


async def list_models(connection: Connection, after: str, limit: int) -> list[ModelView]:
    """Return models in the order of their ids."""
    rows = await connection.fetch(
        "SELECT * FROM model WHERE model_id > $1 ORDER BY model_id LIMIT $2", after, limit
    )
    return [_model(row) for row in rows]


async def get_model(connection: Connection, model_id: str) -> ModelView | None:
    """Return one model."""
    row = await connection.fetchrow("SELECT * FROM model WHERE model_id = $1", model_id)
    return _model(row) if row else None


async def put_model(connection: Connection, model: CatalogModel, etag: int | None) -> ModelView:
    """Create or change a model; raises EtagMoved."""
    row = await connection.fetchrow(
        """
        INSERT INTO model AS m (model_id, spec)
        SELECT $1, $2 WHERE $3::bigint IS NULL OR EXISTS (SELECT 1 FROM model WHERE model_id = $1)
        ON CONFLICT (model_id) DO UPDATE SET spec = $2, etag = m.etag + 1
            WHERE $3::bigint IS NULL OR m.etag = $3
        RETURNING *
        """,
        model.model_id,
        as_json(model),
        etag,
    )
    if row is None:
        raise EtagMoved(model.model_id)
    return _model(row)


_NODES: Final = """
SELECT node_id, pop, address, draining, revoked, generation, assigned, etag, release,
    certificate_serial,
    extract(epoch FROM certificate_expires_at)::float8 AS certificate_expires_at,
    round(abs(extract(epoch FROM clock_timestamp() - last_seen_at)), 1)::float8 AS silent_s,
    (SELECT count(*) FROM placement p WHERE p.node_id = n.node_id AND released_at IS NULL)
        AS replicas,
    (SELECT coalesce(json_agg(d ORDER BY device_id), '[]') FROM device d
        WHERE d.node_id = n.node_id) AS devices
FROM node n
"""


async def list_nodes(connection: Connection, after: str, limit: int) -> list[NodeView]:
    """Return nodes in the order of their ids."""
    rows = await connection.fetch(
        f"{_NODES} WHERE node_id > $1 ORDER BY node_id LIMIT $2", after, limit
    )
    return [_node(row) for row in rows]


async def get_node(connection: Connection, node_id: str) -> NodeView | None:
    """Return one node."""
    row = await connection.fetchrow(f"{_NODES} WHERE node_id = $1", node_id)
    return _node(row) if row else None


async def set_draining(connection: Connection, node_id: str, draining: bool) -> None:
    """Drain or undrain a node."""
    await connection.execute(
        "UPDATE node SET draining = $2, etag = etag + 1 WHERE node_id = $1", node_id, draining
    )


_ROUTERS: Final = """
    SELECT router_id, pop, generation, revoked, release, certificate_serial,
           extract(epoch FROM certificate_expires_at)::float8 AS certificate_expires_at,
           round(abs(extract(epoch FROM clock_timestamp() - last_seen_at)), 1)::float8 AS silent_s
    FROM router
"""


async def get_router(connection: Connection, router_id: str) -> RouterView | None:
    """Return one router."""
    row = await connection.fetchrow(f"{_ROUTERS} WHERE router_id = $1", router_id)
    return as_struct(row, RouterView) if row else None


async def list_routers(connection: Connection, after: str, limit: int) -> list[RouterView]:
    """Return routers in the order of their ids."""
    rows = await connection.fetch(
        f"{_ROUTERS} WHERE router_id > $1 ORDER BY router_id LIMIT $2", after, limit
    )
    return [as_struct(row, RouterView) for row in rows]


async def list_placements(
    connection: Connection, after: str, limit: int, deployment_id: str | None = None
) -> list[PlacementView]:
    """Return placements that still occupy their devices, in the order of their ids."""
    rows = await connection.fetch(
        """
        SELECT replica_id, deployment_id, version, p.node_id, n.pop, memory_bytes, p.role, state,
               state_reason, reason, restarts, fetched_bytes, ended_at IS NOT NULL AS ending,
               coalesce(ended_reason, '') AS ended_reason, coalesce(leader_id, '') AS leader_id,
               round(greatest(0, extract(epoch FROM clock_timestamp() - state_since)), 1)::float8
                   AS state_age_s,
               array(SELECT device_id FROM placement_device d WHERE d.replica_id = p.replica_id
                     ORDER BY device_id) AS device_ids
        FROM placement p JOIN node n USING (node_id)
        WHERE released_at IS NULL AND replica_id > $1
          AND ($3::text IS NULL OR deployment_id = $3)
        ORDER BY replica_id LIMIT $2
        """,
        after,
        limit,
        deployment_id,
    )
    return [as_struct(row, PlacementView) for row in rows]


def _model(row: asyncpg.Record) -> ModelView:
    return ModelView(model=msgspec.json.decode(row["spec"], type=CatalogModel), etag=row["etag"])


def _node(row: asyncpg.Record) -> NodeView:
    devices = msgspec.json.decode(row["devices"], type=tuple[NodeDevice, ...])
    return as_struct(row, NodeView, devices=devices)
