"""The rows of LoRA adapters. Uploaded files lie in the batch folder."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec

from isochrone.wire.ids import ModelId, NodeId, TenantId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile
from isochrone.wire.peers.adapter import CLUSTER_SCHEME, AdapterEntry
from scheduler.store.pool import Connection, as_json, as_struct
from scheduler.store.readable_rows import RowReader


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `file_id` is its name in the batch folder, empty if it was not uploaded."""

    path: str
    size_bytes: int
    sha256: str
    file_id: str = ""


class StoredAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter, complete once it has a `digest`. Times are Unix time."""

    adapter_id: str
    tenant_id: str
    name: str
    description: str
    model_id: str
    model_name: str
    is_public: bool
    rank: int
    files: tuple[AdapterFile, ...]
    source: str
    digest: str | None
    created_at: float
    modified_at: float
    etag: int = 0

    def file(self, path: str) -> AdapterFile | None:
        """Return one of its files."""
        return next((file for file in self.files if file.path == path), None)

    def entry(self) -> AdapterEntry:
        """Return what routers hold of it."""
        artifact = None
        if self.digest is not None:
            artifact = Artifact(
                source=self.source or f"{CLUSTER_SCHEME}adapters/{self.adapter_id}",
                files=tuple(
                    ArtifactFile(path=f.path, size_bytes=f.size_bytes, sha256=f.sha256)
                    for f in self.files
                ),
                digest=self.digest,
            )
        return AdapterEntry(
            adapter_id=self.adapter_id,
            name=self.name,
            tenant_id=TenantId(self.tenant_id),
            model_id=ModelId(self.model_id),
            is_public=self.is_public,
            rank=self.rank,
            artifact=artifact,
            modified_at=self.modified_at,
        )


_COLUMNS: Final = (
    "adapter_id, tenant_id, name, description, model_id, model_name, is_public, rank, files,"
    " source, digest, extract(epoch FROM created_at)::float8 AS created_at,"
    " extract(epoch FROM modified_at)::float8 AS modified_at,"
    " (extract(epoch FROM modified_at) * 1000000)::bigint AS etag"
)


def _adapter(row: asyncpg.Record) -> StoredAdapter:
    files = msgspec.json.decode(row["files"], type=tuple[AdapterFile, ...])
    return as_struct(row, StoredAdapter, files=files)


async def add_adapter(connection: Connection, adapter: StoredAdapter) -> StoredAdapter | None:
    """Add an adapter; None if the tenant has one of this name. Its times are set here."""
    row = await connection.fetchrow(
        f"""
        INSERT INTO adapter (adapter_id, tenant_id, name, description, model_id, model_name,
            is_public, rank, files, source, digest)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
        ON CONFLICT (tenant_id, name) DO NOTHING RETURNING {_COLUMNS}
        """,  # noqa: S608 - a constant
        adapter.adapter_id,
        adapter.tenant_id,
        adapter.name,
        adapter.description,
        adapter.model_id,
        adapter.model_name,
        adapter.is_public,
        adapter.rank,
        as_json(adapter.files),
        adapter.source,
        adapter.digest,
    )
    return _adapter(row) if row else None


async def lock_tenant_adapters(connection: Connection, tenant_id: str) -> int:
    """Return how many adapters a tenant has, and let no other transaction add one meanwhile."""
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended('adapter ' || $1, 0))", tenant_id
    )
    count = await connection.fetchval(
        "SELECT count(*) FROM adapter WHERE tenant_id = $1", tenant_id
    )
    return int(count)


async def get_adapter(
    connection: Connection, adapter_id: str, *, locked: bool = False
) -> StoredAdapter | None:
    """Return one adapter; `locked` until the transaction ends."""
    row = await connection.fetchrow(
        f"SELECT {_COLUMNS} FROM adapter WHERE adapter_id = $1 {'FOR UPDATE' if locked else ''}",  # noqa: S608
        adapter_id,
    )
    return _adapter(row) if row else None


async def find_adapter(
    connection: Connection, tenant_id: str, name: str, *, locked: bool = False
) -> StoredAdapter | None:
    """Return a tenant's adapter by its id or name; `locked` until the transaction ends."""
    row = await connection.fetchrow(
        f"""
        SELECT {_COLUMNS} FROM adapter WHERE tenant_id = $1 AND (adapter_id = $2 OR name = $2)
        ORDER BY adapter_id <> $2 LIMIT 1 {"FOR UPDATE" if locked else ""}
        """,  # noqa: S608 - constants
        tenant_id,
        name,
    )
    return _adapter(row) if row else None


async def has_adapter_file(connection: Connection, file_id: str) -> bool:
    """Return whether an uploaded file is one of an adapter's."""
    query = "SELECT EXISTS (SELECT FROM adapter WHERE files @> $1::jsonb)"
    return bool(await connection.fetchval(query, as_json([{"file_id": file_id}])))


async def adapter_files_among(connection: Connection, file_ids: Sequence[str]) -> set[str]:
    """Return those of the ids that are files of adapters."""
    rows = await connection.fetch(
        """
        SELECT file ->> 'file_id' AS file_id FROM adapter, jsonb_array_elements(files) AS file
        WHERE file ->> 'file_id' = ANY($1)
        """,
        file_ids,
    )
    return {row["file_id"] for row in rows}


async def set_files(
    connection: Connection, adapter: StoredAdapter, files: tuple[AdapterFile, ...], rank: int
) -> StoredAdapter:
    """Store the files that an adapter has now; `rank` completes it, 0 does not."""
    manifest = [
        ArtifactFile(path=file.path, size_bytes=file.size_bytes, sha256=file.sha256)
        for file in files
    ]
    row = await connection.fetchrow(
        f"""
        UPDATE adapter SET files = $2, rank = $3, digest = $4, modified_at = now()
        WHERE adapter_id = $1 RETURNING {_COLUMNS}
        """,  # noqa: S608 - a constant
        adapter.adapter_id,
        as_json(files),
        rank,
        manifest_digest(manifest) if rank else None,
    )
    assert row is not None, "its row is locked"
    return _adapter(row)


async def set_public(
    connection: Connection, adapter_id: str, is_public: bool
) -> StoredAdapter | None:
    """Let all tenants use an adapter, or its own alone."""
    row = await connection.fetchrow(
        f"""
        UPDATE adapter SET is_public = $2, modified_at = clock_timestamp() WHERE adapter_id = $1
        RETURNING {_COLUMNS}
        """,  # noqa: S608
        adapter_id,
        is_public,
    )
    return _adapter(row) if row else None


_ORDERS: Final = {
    "created_at": "adapter.created_at",
    "modified_at": "adapter.modified_at",
    "name": "name",
    "model": "model_name",
    "id": "adapter_id",
}
ORDERS: Final = tuple(_ORDERS)
"""The columns that a list can be ordered by."""


async def list_tenant_adapters(connection: Connection, tenant_id: str) -> list[StoredAdapter]:
    """Return a tenant's adapters, the newest first."""
    rows = await connection.fetch(
        f"""
        SELECT {_COLUMNS} FROM adapter WHERE tenant_id = $1
        ORDER BY adapter.created_at DESC, adapter_id
        """,  # noqa: S608 - a constant
        tenant_id,
    )
    return [_adapter(row) for row in rows]


async def list_public_adapters(
    connection: Connection, *, order_by: str, limit: int, offset: int
) -> list[StoredAdapter]:
    """Return complete public adapters, in the order of one of ORDERS."""
    rows: list[Any] = await connection.fetch(
        f"""
        SELECT {_COLUMNS} FROM adapter WHERE is_public AND digest IS NOT NULL
        ORDER BY {_ORDERS[order_by]}, adapter_id LIMIT $1 OFFSET $2
        """,  # noqa: S608 - constants
        limit,
        offset,
    )
    return [_adapter(row) for row in rows]


async def list_adapters(
    connection: Connection, after: str, limit: int, tenant_id: str | None = None
) -> list[StoredAdapter]:
    """Return the adapters of all tenants, or of one, in the order of their ids."""
    rows = await connection.fetch(
        f"""
        SELECT {_COLUMNS} FROM adapter
        WHERE adapter_id > $1 AND ($3::text IS NULL OR tenant_id = $3)
        ORDER BY adapter_id LIMIT $2
        """,  # noqa: S608
        after,
        limit,
        tenant_id,
    )
    return [_adapter(row) for row in rows]


class AdapterNodes(NamedTuple):
    """How many nodes have an adapter's files, and the first of them by name."""

    total: int
    first: tuple[NodeId, ...]


async def nodes_with(
    connection: Connection, digests: Sequence[str], limit: int
) -> dict[str, AdapterNodes]:
    """Return the nodes that have these artifacts on disk, `limit` of each by name."""
    rows = await connection.fetch(
        """
        SELECT digest, count(*) AS total, (array_agg(node_id ORDER BY node_id))[:$2] AS first
        FROM artifact_holder WHERE digest = ANY($1::text[]) GROUP BY digest
        """,
        list(digests),
        limit,
    )
    return {row["digest"]: AdapterNodes(row["total"], tuple(row["first"])) for row in rows}


class TenantAdapters(NamedTuple):
    """How many adapters a tenant has, and the size of their files."""

    tenant_id: str
    adapters: int
    size_bytes: int


async def list_tenants_with_adapters(
    connection: Connection, after: str, limit: int
) -> list[TenantAdapters]:
    """Return all tenants with adapters in the order of their names."""
    rows = await connection.fetch(
        """
        SELECT tenant_id, count(DISTINCT adapter_id) AS adapters,
               coalesce(sum((file->>'size_bytes')::bigint), 0)::bigint AS size_bytes
        FROM adapter LEFT JOIN LATERAL jsonb_array_elements(files) AS file ON true
        WHERE tenant_id > $1 GROUP BY tenant_id ORDER BY tenant_id LIMIT $2
        """,
        after,
        limit,
    )
    return [TenantAdapters(*row) for row in rows]


async def read_adapter_entries(connection: Connection) -> tuple[AdapterEntry, ...]:
    """Return what routers hold of all adapters, in the order of their ids."""
    rows = await connection.fetch(f"SELECT {_COLUMNS} FROM adapter ORDER BY adapter_id")  # noqa: S608
    reader = RowReader()
    entries = reader.read_each(
        "adapter", rows, lambda row: _adapter(row).entry(), name="adapter_id"
    )
    reader.log_all()
    return entries


async def delete_adapter(connection: Connection, adapter_id: str) -> StoredAdapter | None:
    """Delete an adapter; return what it was."""
    row = await connection.fetchrow(
        f"DELETE FROM adapter WHERE adapter_id = $1 RETURNING {_COLUMNS}",  # noqa: S608
        adapter_id,
    )
    return _adapter(row) if row else None


async def delete_adapters(connection: Connection, tenant_id: str) -> list[StoredAdapter]:
    """Delete all adapters of a tenant; return what they were."""
    rows = await connection.fetch(
        f"DELETE FROM adapter WHERE tenant_id = $1 RETURNING {_COLUMNS}",  # noqa: S608
        tenant_id,
    )
    return [_adapter(row) for row in rows]
