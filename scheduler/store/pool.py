"""The pool: connections that find the writable host, and are dropped when they turn out wrong.

asyncpg tries the hosts of a DSN under one time-out, so a hung first host hides the second; and a
pooled connection to a demoted server fails for ever (SQLSTATE 25006). Both are mended here.
"""

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg
import msgspec

log = logging.getLogger(__name__)

Pool = asyncpg.Pool
Connection = asyncpg.pool.PoolConnectionProxy | asyncpg.Connection
S = TypeVar("S")

CONNECT_TIMEOUT_S: Final = 2.0
STATEMENT_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 5.0
"""How long a transaction may wait for its next statement before Postgres ends it. What a process
that hangs, or a host that is gone, holds in its deed (the epoch above all) is free after that."""

ACQUIRE_TIMEOUT_S: Final = 1.0
INTAKE_TIMEOUT_S: Final = 10.0
"""How long what a fleet reports may wait for a connection, while all of it connects at once."""

SIZE_MAX: Final = 20
TEXT_MAX: Final = 500

UNAVAILABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.InsufficientResourcesError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.DeadlockDetectedError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.ReadOnlySQLTransactionError,
)
"""What a caller sees of a database that cannot be used now, whatever the reason."""

CONNECT_ERRORS: Final = (*UNAVAILABLE, asyncpg.PostgresError)
"""What is said at a start: also a name, a password or a right that is not the one."""

BAD_DATA: Final = (
    asyncpg.CharacterNotInRepertoireError,
    asyncpg.DataError,
    asyncpg.CheckViolationError,
)
"""What a caller sees of a value that Postgres cannot hold (a NUL in a text, a number too big), or
that a table's own rule refuses (a device of less than no memory)."""


async def open_pool(dsn: str, *, size_max: int = SIZE_MAX) -> Pool:
    """Open a pool on the writable host of `dsn`; raises one of UNAVAILABLE if there is none."""
    hosts = _each_host(dsn)
    options: dict[str, Any] = {}
    if await _is_pooled_by_transaction(hosts):
        # Prepared statements do not survive a transaction pooler; neither would LISTEN or session
        # locks, which nothing here uses.
        log.info("a transaction pooler stands before Postgres: statement cache off")
        options["statement_cache_size"] = 0

    async def connect(*_: Any, **given: Any) -> asyncpg.Connection:
        return await _connect(hosts, {**given, **options})

    return await asyncpg.create_pool(
        hosts[0],
        min_size=1,
        max_size=size_max,
        connect=connect,
        command_timeout=STATEMENT_TIMEOUT_S,
        max_inactive_connection_lifetime=60.0,
        # Nothing here changes a session; asyncpg ends an open transaction by itself.
        reset=_leave_as_it_is,
    )


async def _leave_as_it_is(connection: asyncpg.Connection) -> None:
    """Save the round trip of a reset at each return to the pool."""


@asynccontextmanager
async def using(pool: Pool, timeout_s: float = ACQUIRE_TIMEOUT_S) -> AsyncIterator[Connection]:
    """Lend a connection; drop what turns out wrong before raising.

    A connection that hangs is dropped alone, and a pool that is merely busy is left as it is: what
    others hold may well be working. A server that is broken or demoted is so for every connection.
    """
    async with pool.acquire(timeout=timeout_s) as connection:
        try:
            yield connection
        except TimeoutError:
            connection.terminate()
            raise
        except UNAVAILABLE:
            await pool.expire_connections()
            raise


@asynccontextmanager
async def transaction(
    pool: Pool,
    *,
    isolation: Any = "read_committed",
    timeout_s: float = ACQUIRE_TIMEOUT_S,
    async_commit: bool = False,
) -> AsyncIterator[Connection]:
    """Lend a connection inside a transaction.

    With `async_commit`, its commit returns before it is on disk: for what is said again after a
    crash.
    Who reads a picture ("repeatable_read") holds nobody up, and may take its time.
    """
    # Set here and not as the connection begins: a transaction pooler refuses it there.
    settings = f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S * 1000:.0f}ms'"
    if async_commit:
        settings += "; SET LOCAL synchronous_commit = off"
    async with using(pool, timeout_s) as connection, connection.transaction(isolation=isolation):
        if isolation == "read_committed":
            await connection.execute(settings)
        yield connection


def storable_text(words: str) -> str:
    """Return what Postgres can hold of a peer's words: an engine's last output may hold a NUL."""
    return words.replace("\0", "")[:TEXT_MAX]


async def fetch_one(connection: Connection, query: str, *arguments: Any) -> asyncpg.Record:
    """Return the one row of a query that always has one."""
    row = await connection.fetchrow(query, *arguments)
    assert row is not None
    return row


def as_struct(row: asyncpg.Record, kind: type[S], **others: Any) -> S:
    """Return what a row tells: its columns are the struct's fields, but for `others`."""
    return msgspec.convert({**row, **others}, kind)


def columns(rows: Collection[object], *names: str) -> list[list[Any]]:
    """Return what these fields hold, column by column, as unnest() takes them."""
    return [list(map(attrgetter(name), rows)) for name in names]


def as_json(value: object) -> str:
    """Return a value as a JSON column takes it."""
    return msgspec.json.encode(value).decode()


def affected_rows(done: str) -> int:
    """Return how many rows a statement wrote, of what Postgres said when it was done."""
    return int(done.rpartition(" ")[2])


def _each_host(dsn: str) -> list[str]:
    """Split a multi-host DSN into one DSN a host: each then has a time-out of its own."""
    parts = urlsplit(dsn)
    if parse_qs(parts.query).get("host"):
        return [dsn]
    credentials, at, hosts = parts.netloc.rpartition("@")
    return [
        parts._replace(netloc=f"{credentials}{at}{host}").geturl()
        for host in (hosts.split(",") if hosts else [""])
    ]


async def _connect(hosts: list[str], options: dict[str, Any]) -> asyncpg.Connection:
    options = {**options, "timeout": CONNECT_TIMEOUT_S, "target_session_attrs": "read-write"}
    last: BaseException | None = None
    for host in hosts:
        try:
            return await asyncpg.connect(host, **options)
        except UNAVAILABLE as error:
            last = error
    assert last is not None
    raise last


async def _is_pooled_by_transaction(hosts: list[str]) -> bool:
    """Say whether backends are lent for a transaction only, even by a pooler that is idle.

    An idle pooler lends one client the same backend time after time, and looks like none. So a
    second client holds a transaction open meanwhile: through a pooler it gets the very backend of
    the first, or the first gets another; without one neither can be.
    """
    options = {"statement_cache_size": 0}
    first = await _connect(hosts, options)
    try:
        second = await _connect(hosts, options)
        try:
            before = await first.fetchval("SELECT pg_backend_pid()")
            async with second.transaction():
                held = await second.fetchval("SELECT pg_backend_pid()")
                after = await first.fetchval("SELECT pg_backend_pid()")
        finally:
            await second.close()
    finally:
        await first.close()
    return bool(held == before or after != before)
