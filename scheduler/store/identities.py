"""Who may be of this cluster: join tokens, peers' names, and certificates that are refused.

Rule 1: a revoked name stays revoked until an operator readmits it; joining again does not.
Rule 2: a name once in use is taken again only with a token bound to it.
Rule 3: what is revoked by name is every certificate issued before that moment, known here or not: a
database restored from a backup knows none of the newest.
"""

from datetime import datetime
from typing import Final

import asyncpg
import msgspec

from isochrone.wire.admin import JoinTokenView, RevocationView
from isochrone.wire.assignment import Revoked
from isochrone.wire.control import PeerRole
from isochrone.wire.ids import PopId
from scheduler.store.pool import Connection, affected_rows, as_struct, fetch_one

PEER_TABLES: Final = {PeerRole.AGENT: ("node", "node_id"), PeerRole.ROUTER: ("router", "router_id")}

REVOKED_MAX: Final = 2000
"""How many revocations a node is told at most, the newest."""

_RISE: Final = {PeerRole.AGENT: ", etag = etag + 1", PeerRole.ROUTER: ""}

_JOIN: Final = """
    token_id, pop, role, used_by, name, uses, uses_max,
    extract(epoch FROM expires_at)::float8 AS expires_at
"""
_REVOCATION: Final = "role, name, serial, reason, extract(epoch FROM at)::float8 AS at"

REVOKED: Final = """
    SELECT FROM revocation r WHERE r.role = $6 AND r.name = $1
        AND (r.serial = $4 OR (r.serial = '' AND r.at > $7))
"""
"""What refuses a certificate: $1 its name, $4 its serial, $6 its role, $7 when it was issued."""


class NameTaken(Exception):
    """The name is another PoP's or another peer's."""


class NameRevoked(Exception):
    """The name was turned away for good."""


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
    """Keep a join token's digest; None where there is no such PoP."""
    try:
        async with connection.transaction():
            row = await fetch_one(
                connection,
                f"""
                INSERT INTO join_token
                    (token_id, secret_sha256, role, pop, expires_at, name, uses_max)
                VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5), $6, $7)
                RETURNING {_JOIN}
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
        f"SELECT {_JOIN} FROM join_token WHERE token_id > $1 ORDER BY token_id LIMIT $2",  # noqa: S608
        after,
        limit,
    )
    return [as_struct(row, JoinTokenView) for row in rows]


class UsedJoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """What a join token gave: its PoP, and whether it was made for this very name."""

    pop: PopId
    is_bound: bool


async def use_join_token(
    connection: Connection, *, token_id: str, secret_sha256: str, role: PeerRole, name: str
) -> UsedJoinToken | None:
    """Spend one use of a join token; None where it is not (or no more) good for this peer.

    One statement: of two that present the last use, one gets it.
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
    """Make the row of a peer that has joined; raises NameTaken or NameRevoked."""
    table, column = PEER_TABLES[role]
    added = await connection.fetchval(
        f"INSERT INTO {table} ({column}, pop) VALUES ($1, $2)"  # noqa: S608
        f" ON CONFLICT ({column}) DO NOTHING RETURNING pop",
        name,
        pop,
    )
    if added is not None:
        return
    held = await fetch_one(
        connection,
        f"SELECT pop, revoked, boot_id FROM {table} WHERE {column} = $1 FOR UPDATE",  # noqa: S608
        name,
    )
    if held["revoked"]:
        then = f", or readmit it (`isochrone nodes readmit {name}`)" * (role is PeerRole.AGENT)
        raise NameRevoked(f"{name} is revoked; take another name{then}")
    if held["pop"] != pop:
        raise NameTaken(f"{name} is in another PoP")
    if held["boot_id"] and not is_bound:
        raise NameTaken(
            f"the name {name} is in use; take another, or a token bound to it "
            f"(`isochrone nodes join-token {pop} --name {name}`)"
        )


async def may_renew(connection: Connection, role: PeerRole, name: str, serial: str) -> bool:
    """Say whether the holder of this certificate may have another; holds its row until then."""
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
    """Return from when on a new certificate of this name outlives its revocations."""
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
    """Refuse one certificate, or, without a serial, the name and all that it was ever issued."""
    table, column = PEER_TABLES[role]
    if not serial:
        await connection.execute(
            f"UPDATE {table} SET revoked = true{_RISE[role]} WHERE {column} = $1",  # noqa: S608
            name,
        )
    row = await fetch_one(
        connection,
        f"""
        INSERT INTO revocation (role, name, serial, reason) VALUES ($1, $2, $3, $4)
        ON CONFLICT (role, name, serial) DO UPDATE SET at = clock_timestamp(), reason = $4
        RETURNING {_REVOCATION}
        """,  # noqa: S608
        role.value,
        name,
        serial,
        reason,
    )
    return as_struct(row, RevocationView)


async def readmit(connection: Connection, role: PeerRole, name: str) -> bool:
    """Let a revoked name join again; its old certificates stay refused. False if it was not."""
    table, column = PEER_TABLES[role]
    done = await connection.execute(
        f"UPDATE {table} SET revoked = false{_RISE[role]} WHERE {column} = $1 AND revoked",  # noqa: S608
        name,
    )
    return affected_rows(done) > 0


async def list_revocations(connection: Connection, after: str, limit: int) -> list[RevocationView]:
    """Return revocations in the order of `role/name/serial`."""
    rows = await connection.fetch(
        f"""
        SELECT {_REVOCATION} FROM revocation
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
        f"SELECT {_REVOCATION} FROM revocation"  # noqa: S608
        " WHERE at > now() - make_interval(secs => $1)",  # an index serves this, read every 2 s
        since_s,
    )
    return [as_struct(row, RevocationView) for row in rows]


async def newest_revocations(connection: Connection) -> tuple[Revoked, ...]:
    """Return what nodes refuse at their doors, the newest first."""
    rows = await connection.fetch(
        f"SELECT {_REVOCATION} FROM revocation ORDER BY revocation.at DESC LIMIT $1",  # noqa: S608
        REVOKED_MAX,
    )
    return tuple(as_struct(row, Revoked) for row in rows)
