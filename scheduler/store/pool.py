"""Connection pools that find the writable host, and drop broken connections.

asyncpg tries all hosts of a DSN under one timeout, so a first host that hangs hides the second; and
a pooled connection to a demoted server fails for ever (SQLSTATE 25006). This module handles both.
"""

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from operator import attrgetter
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg
import msgspec

log = logging.getLogger(__name__)

# While Postgres hangs, asyncpg's pools warn every few seconds, with a traceback, that they cannot
# reconnect. Each caller that needs a connection logs its own failure.
logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)

Pool = asyncpg.Pool
Connection = asyncpg.pool.PoolConnectionProxy | asyncpg.Connection
S = TypeVar("S")

CONNECT_TIMEOUT_S: Final = 2.0
STATEMENT_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 5.0
"""How long a transaction may wait for its next statement before Postgres ends it. The locks of a
process that hangs or a host that is gone (the epoch above all) are released after that."""

ACQUIRE_TIMEOUT_S: Final = 1.0
INTAKE_TIMEOUT_S: Final = 10.0
"""The longest wait of a fleet's reports for a connection, while all peers connect at once."""

NOT_BY_INDEX: Final = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
"""Settings that are off in a transaction `by_index`, so that Postgres scans or sorts only where no
index helps. It rates such plans as so expensive that it would compile each statement (`jit`)."""

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
"""The errors of a database that cannot be used now, whatever the reason."""

CONNECT_ERRORS: Final = (*UNAVAILABLE, asyncpg.PostgresError)
"""The errors at a start, which include a wrong database, password or permission."""

BAD_DATA: Final = (
    asyncpg.CharacterNotInRepertoireError,
    asyncpg.DataError,
    asyncpg.CheckViolationError,
    asyncpg.ProgramLimitExceededError,
)
"""The errors for a value that Postgres cannot store (a NUL in a text, a number too large, a text
that is too long for an index) or that a table's constraint refuses (negative memory)."""


async def open_pool(dsn: str, *, size_max: int = SIZE_MAX) -> Pool:
    """Open a pool on the writable host of `dsn`; raises one of UNAVAILABLE if there is none."""
    hosts = _each_host(dsn)
    options: dict[str, Any] = {}
    if await _has_transaction_pooler(hosts):
        # Prepared statements do not work through a transaction pooler; neither would LISTEN or
        # session locks, which are not used here.
        log.info("Postgres is behind a transaction pooler: statement cache off")
        options["statement_cache_size"] = 0

    async def connect(*_: Any, **defaults: Any) -> asyncpg.Connection:
        return await _connect(hosts, {**defaults, **options})

    return await asyncpg.create_pool(
        hosts[0],
        min_size=1,
        max_size=size_max,
        connect=connect,
        command_timeout=STATEMENT_TIMEOUT_S,
        max_inactive_connection_lifetime=60.0,
        # No session state is ever set, and asyncpg itself ends an open transaction.
        reset=_skip_reset,
    )


async def _skip_reset(connection: asyncpg.Connection) -> None:
    """Do nothing, which saves a round trip at each return to the pool."""


@asynccontextmanager
async def using(pool: Pool, timeout_s: float = ACQUIRE_TIMEOUT_S) -> AsyncIterator[Connection]:
    """Lend a connection; drop broken connections before raising.

    After a timeout only the lent connection is dropped: others may be working. Other errors mean a
    broken or demoted server, so all connections are replaced. A pool that is merely busy raises
    TimeoutError and keeps its connections.
    """
    async with pool.acquire(timeout=timeout_s) as connection:
        try:
            yield connection
        except TimeoutError:
            with suppress(asyncpg.InterfaceError):  # the pool has taken it back already
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
    by_index: bool = False,
) -> AsyncIterator[Connection]:
    """Lend a connection inside a transaction.

    With `async_commit` the commit returns before it is on disk: for data that its sender repeats
    after a crash. With `by_index` rows are found by indexes, and read in their order: for tables
    that change faster than their statistics. Only "read_committed" transactions get the idle
    timeout: others do not write, and so block no one.
    """
    # Set for each transaction: a transaction pooler refuses it as a connection parameter.
    settings = f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S * 1000:.0f}ms'"
    if async_commit:
        settings += "; SET LOCAL synchronous_commit = off"
    if by_index:
        settings += "".join(f"; SET LOCAL {name} = off" for name in NOT_BY_INDEX)
    async with using(pool, timeout_s) as connection, connection.transaction(isolation=isolation):
        if isolation == "read_committed":
            await connection.execute(settings)
        yield connection


def storable_text(text: str) -> str:
    """Return `text` without NULs, which Postgres cannot store, and cut to TEXT_MAX characters."""
    return text.replace("\0", "")[:TEXT_MAX]


async def fetch_one(connection: Connection, query: str, *arguments: Any) -> asyncpg.Record:
    """Return the row of a query that always returns exactly one."""
    row = await connection.fetchrow(query, *arguments)
    assert row is not None
    return row


def as_struct(row: asyncpg.Record, kind: type[S], **fields: Any) -> S:
    """Convert a row to a struct whose fields are its columns, except those given as `fields`."""
    return msgspec.convert({**row, **fields}, kind)


def columns(rows: Collection[object], *names: str) -> list[list[Any]]:
    """Return these fields of all rows as one list for each field, for unnest()."""
    return [list(map(attrgetter(name), rows)) for name in names]


def as_json(value: object) -> str:
    """Encode a value for a JSON column."""
    return msgspec.json.encode(value).decode()


def affected_rows(status: str) -> int:
    """Return the number of rows in the status that a statement returned, such as `UPDATE 3`."""
    return int(status.rpartition(" ")[2])


def _each_host(dsn: str) -> list[str]:
    """Split a multi-host DSN into one DSN for each host, so that each has its own timeout.

    Hosts are listed in the parameter `host` (with `port`, for folders of Unix sockets), or in the
    place that URLs have for one.
    """
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if hosts := query.get("host"):
        names, ports = hosts.split(","), query.get("port", "").split(",")
        if len(ports) not in (1, len(names)):
            raise asyncpg.exceptions.ClientConfigurationError(
                f"cannot use the database URL: it lists {len(names)} hosts and {len(ports)} ports"
            )
        return [
            parts._replace(query=_with_host(query, name, ports[number % len(ports)])).geturl()
            for number, name in enumerate(names)
        ]
    credentials, at, listed = parts.netloc.rpartition("@")
    return [
        parts._replace(netloc=f"{credentials}{at}{host}").geturl()
        for host in (listed.split(",") if listed else [""])
    ]


def _with_host(query: Mapping[str, str], host: str, port: str) -> str:
    fields = {**query, "host": host, "port": port}
    if not port:
        del fields["port"]
    return urlencode(fields, quote_via=quote, safe="/")


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


async def _has_transaction_pooler(hosts: list[str]) -> bool:
    """Return whether a pooler assigns backends for the length of a transaction only.

    An idle pooler gives a single client the same backend each time, as if there were no pooler. So
    a second client holds a transaction open meanwhile: through a pooler, either it gets the first
    client's backend or the first client gets another one. Without a pooler neither can happen.
    """
    options = {"statement_cache_size": 0}
    first = await _connect(hosts, options)
    try:
        second = await _connect(hosts, options)
        try:
            before = await first.fetchval("SELECT pg_backend_pid()")
            async with second.transaction():
                other = await second.fetchval("SELECT pg_backend_pid()")
                after = await first.fetchval("SELECT pg_backend_pid()")
        finally:
            await second.close()
    finally:
        await first.close()
    return bool(other == before or after != before)
