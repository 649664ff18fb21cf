"""Join tokens, the names of peers, and revoked certificates.

Rule 1: a revoked name stays revoked until an operator readmits it; joining again is refused.
Rule 2: a peer can join again under a name that has been in use only with a token bound to that
name.
Rule 3: revoking a name revokes every certificate issued before, known to the database or not: a
database restored from a backup does not know the newest ones.
"""

from datetime import datetime
from typing import Final

import asyncpg
import msgspec

from isochrone.wire.admin import JoinTokenView, RevocationView
from isochrone.wire.ids import PopId
from isochrone.wire.peers.assignment import RevokedCertificate
from isochrone.wire.peers.control import PeerRole, join_token_command
from scheduler.store.pool import Connection, affected_rows, as_struct, fetch_one

PEER_TABLES: Final = {PeerRole.AGENT: ("node", "node_id"), PeerRole.ROUTER: ("router", "router_id")}

REVOKED_MAX: Final = 2000
"""How many revocations are sent to nodes at most, the newest first."""

_BUMP_ETAG: Final = {PeerRole.AGENT: ", etag = etag + 1", PeerRole.ROUTER: ""}

_JOIN_COLUMNS: Final = """
    token_id, pop, role, used_by, name, uses, uses_max,
    extract(epoch FROM expires_at)::float8 AS expires_at
"""
_REVOCATION_COLUMNS: Final = "role, name, serial, reason, extract(epoch FROM at)::float8 AS at"

REVOKED_QUERY: Final = """
    SELECT FROM revocation r WHERE r.role = $6 AND r.name = $1
        AND (r.serial = $4 OR (r.serial = '' AND r.at > $7))
"""
"""Finds revocations of a certificate: $1 name, $4 serial, $6 role, $7 time of issue."""


class NameTaken(Exception):
    """The name is used in another PoP or by another peer."""


class NameRevoked(Exception):
    """The name is revoked."""


async def add_join_token(
    connection: Connection,
    *,
    token_id: str,
    secret_sha256: str,
    role: str,
    pop: str,
    ttl_s: float,
    name: str | None = None,
    uses_max: int = 1,
) -> JoinTokenView | None:
    """Store a join token's digest; None if the PoP does not exist."""
    try:
        async with connection.transaction():
            row = await fetch_one(
                connection,
                f"""
                INSERT INTO join_token
                    (token_id, secret_sha256, role, pop, expires_at, name, uses_max)
                VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5), $6, $7)
                RETURNING {_JOIN_COLUMNS}
                """,  # noqa: S608
                token_id,
                secret_sha256,
                role,
                pop,
                ttl_s,
                name,
                uses_max,
            )
    except asyncpg.ForeignKeyViolationError:
        return None
    return as_struct(row, JoinTokenView)


async def list_join_tokens(connection: Connection, after: str, limit: int) -> list[JoinTokenView]:
    """Return join tokens in the order of their ids, never their secrets."""
    rows = await connection.fetch(
        f"SELECT {_JOIN_COLUMNS} FROM join_token WHERE token_id > $1 ORDER BY token_id LIMIT $2",  # noqa: S608
        after,
        limit,
    )
    return [as_struct(row, JoinTokenView) for row in rows]


async def delete_join_token(connection: Connection, token_id: str) -> JoinTokenView | None:
    """Delete a join token; return what it was."""
    row = await connection.fetchrow(
        f"DELETE FROM join_token WHERE token_id = $1 RETURNING {_JOIN_COLUMNS}",  # noqa: S608
        token_id,
    )
    return as_struct(row, JoinTokenView) if row else None


class UsedJoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """The rights of a used join token: its PoP, and whether it is bound to the peer's name."""

    pop: PopId
    is_bound: bool


async def use_join_token(
    connection: Connection, *, token_id: str, secret_sha256: str, role: PeerRole, name: str
) -> UsedJoinToken | None:
    """Use a join token once; None if it is not, or no longer, valid for this peer.

    A single statement, so that only one of two simultaneous peers gets the last use.
    """
    row = await connection.fetchrow(
        """
        UPDATE join_token SET uses = uses + 1, used_at = clock_timestamp(), used_by = $4
        WHERE token_id = $1 AND secret_sha256 = $2 AND role = $3
          AND uses < uses_max AND (uses_max > 1 OR used_at IS NULL)
          AND (name IS NULL OR name = $4) AND expires_at > clock_timestamp()
        RETURNING pop, name
        """,
        token_id,
        secret_sha256,
        role.value,
        name,
    )
    return UsedJoinToken(pop=PopId(row["pop"]), is_bound=row["name"] is not None) if row else None


async def add_peer(
    connection: Connection, role: PeerRole, name: str, pop: PopId, *, is_bound: bool = False
) -> None:
    """Add the row of a joining peer, unless it exists; raises NameTaken or NameRevoked."""
    table, column = PEER_TABLES[role]
    added = await connection.fetchval(
        f"INSERT INTO {table} ({column}, pop) VALUES ($1, $2)"  # noqa: S608
        f" ON CONFLICT ({column}) DO NOTHING RETURNING pop",
        name,
        pop,
    )
    if added is not None:
        return
    peer = await fetch_one(
        connection,
        f"SELECT pop, revoked, boot_id FROM {table} WHERE {column} = $1 FOR UPDATE",  # noqa: S608
        name,
    )
    _require_joinable(peer, role, name, pop)
    if peer["boot_id"] and not is_bound:
        raise NameTaken(
            f"the name {name} is in use; use another, or a token bound to it "
            f"(`{join_token_command(role, pop, name)}`)"
        )


async def check_name(connection: Connection, role: PeerRole, name: str, pop: PopId) -> None:
    """Raise NameTaken or NameRevoked if no peer could join this PoP under this name now."""
    table, column = PEER_TABLES[role]
    peer = await connection.fetchrow(
        f"SELECT pop, revoked FROM {table} WHERE {column} = $1",  # noqa: S608
        name,
    )
    if peer is not None:
        _require_joinable(peer, role, name, pop)


def _require_joinable(peer: asyncpg.Record, role: PeerRole, name: str, pop: PopId) -> None:
    if peer["revoked"]:
        hint = f", or readmit it (`isochrone nodes readmit {name}`)" * (role is PeerRole.AGENT)
        raise NameRevoked(f"{name} is revoked; use another name{hint}")
    if peer["pop"] != pop:
        group = "nodes" if role is PeerRole.AGENT else "routers"
        raise NameTaken(
            f"{name} is in another PoP, {peer['pop']}; to move it, delete it there first"
            f" (`isochrone {group} delete {name}`)"
        )


async def may_renew(connection: Connection, role: PeerRole, name: str, serial: str) -> bool:
    """Return whether this certificate may be renewed; locks the peer's row for the transaction."""
    table, column = PEER_TABLES[role]
    found = await connection.fetchval(
        f"""
        SELECT 1 FROM {table} WHERE {column} = $1 AND NOT revoked AND NOT EXISTS (
            SELECT FROM revocation r WHERE r.role = $3 AND r.name = $1 AND r.serial = $2)
        FOR UPDATE
        """,  # noqa: S608
        name,
        serial,
        role.value,
    )
    return found is not None


async def issue_not_before(connection: Connection, role: PeerRole, name: str) -> datetime | None:
    """Return the time from which a certificate of this name is newer than its revocations."""
    at: datetime | None = await connection.fetchval(
        """
        SELECT date_trunc('second', max(at)) + interval '1 second' FROM revocation
        WHERE role = $1 AND name = $2
        """,
        role.value,
        name,
    )
    return at


async def revoke(
    connection: Connection, role: PeerRole, name: str, *, serial: str = "", reason: str = ""
) -> RevocationView:
    """Revoke one certificate or, without a serial, the name and every certificate issued to it."""
    table, column = PEER_TABLES[role]
    if not serial:
        await connection.execute(
            f"UPDATE {table} SET revoked = true{_BUMP_ETAG[role]} WHERE {column} = $1",  # noqa: S608
            name,
        )
    row = await fetch_one(
        connection,
        f"""
        INSERT INTO revocation (role, name, serial, reason) VALUES ($1, $2, $3, $4)
        ON CONFLICT (role, name, serial) DO UPDATE SET at = clock_timestamp(), reason = $4
        RETURNING {_REVOCATION_COLUMNS}
        """,  # noqa: S608
        role.value,
        name,
        serial,
        reason,
    )
    return as_struct(row, RevocationView)


async def is_known_name(connection: Connection, role: PeerRole, name: str) -> bool:
    """Return whether a peer of this name has joined; it may have been deleted since."""
    table, column = PEER_TABLES[role]
    found = await connection.fetchval(
        f"""
        SELECT EXISTS (SELECT FROM {table} WHERE {column} = $1)
            OR EXISTS (SELECT FROM revocation WHERE role = $2 AND name = $1)
        """,  # noqa: S608
        name,
        role.value,
    )
    return bool(found)


async def last_serial(connection: Connection, role: PeerRole, name: str) -> str:
    """Return the serial of the certificate that a peer registered with last, or an empty text."""
    table, column = PEER_TABLES[role]
    found: str | None = await connection.fetchval(
        f"SELECT certificate_serial FROM {table} WHERE {column} = $1",  # noqa: S608
        name,
    )
    return found or ""


async def readmit(connection: Connection, role: PeerRole, name: str) -> bool:
    """Let a revoked name join again; old certificates stay revoked. False if it was not revoked."""
    table, column = PEER_TABLES[role]
    done = await connection.execute(
        f"UPDATE {table} SET revoked = false{_BUMP_ETAG[role]} WHERE {column} = $1 AND revoked",  # noqa: S608
        name,
    )
    return affected_rows(done) > 0


async def list_revocations(connection: Connection, after: str, limit: int) -> list[RevocationView]:
    """Return revocations in the order of `role/name/serial`."""
    rows = await connection.fetch(
        f"""
        SELECT {_REVOCATION_COLUMNS} FROM revocation
        WHERE concat_ws('/', role, name, serial) > $1
        ORDER BY concat_ws('/', role, name, serial) LIMIT $2
        """,  # noqa: S608
        after,
        limit,
    )
    return [as_struct(row, RevocationView) for row in rows]


async def revoked_since(connection: Connection, since_s: float) -> list[RevocationView]:
    """Return what was revoked in the last `since_s` seconds."""
    rows = await connection.fetch(
        f"SELECT {_REVOCATION_COLUMNS} FROM revocation"  # noqa: S608
        # now() can use the index on `at`, which clock_timestamp() cannot.
        " WHERE at > now() - make_interval(secs => $1)",
        since_s,
    )
    return [as_struct(row, RevocationView) for row in rows]


async def newest_revocations(connection: Connection) -> tuple[RevokedCertificate, ...]:
    """Return the revocations that nodes enforce, the newest first."""
    rows = await connection.fetch(
        f"SELECT {_REVOCATION_COLUMNS} FROM revocation ORDER BY revocation.at DESC LIMIT $1",  # noqa: S608
        REVOKED_MAX,
    )
    return tuple(as_struct(row, RevokedCertificate) for row in rows)
