"""Applies migrations/*.sql in order: each in a transaction, once, by one runner at a time."""

import hashlib
import re
from pathlib import Path
from typing import Final, NamedTuple

import asyncpg

import migrations
from scheduler.store.pool import Connection, Pool, transaction

FOLDER: Final = Path(migrations.__file__).parent
MIGRATE_LOCK: Final = 0x150C_0001
MIGRATE_TIMEOUT_S: Final = 300.0
CLIENT_CHECK_S: Final = 1
"""Postgres ends the migration of a runner that was killed after this time. Otherwise it would go on
with its statement, and hold the lock."""

RESTORE_ALL: Final = "a backup was restored in part: restore all of it into an empty database"
ALREADY_THERE: Final = (
    asyncpg.DuplicateTableError,
    asyncpg.DuplicateColumnError,
    asyncpg.DuplicateObjectError,
)

_TABLE = """
CREATE TABLE IF NOT EXISTS migration (
    number     integer PRIMARY KEY,
    name       text NOT NULL,
    sha256     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


class MigrationError(Exception):
    """The database's migrations are not those of this release; nothing was changed."""


class Migration(NamedTuple):
    """One numbered SQL file."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Return the digest by which an edited file is recognised."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def read_migrations() -> tuple[Migration, ...]:
    """Return the migrations of this release, in order."""
    return tuple(
        Migration(int(path.name[:4]), path.stem, path.read_text())
        for path in sorted(FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))
    )


async def migrate(pool: Pool, migrations: tuple[Migration, ...] | None = None) -> list[str]:
    """Apply the missing migrations, by default this release's; return their names.

    Raises MigrationError if the database has an edited or a newer migration, or lacks a part.
    """
    applied = []
    wanted = read_migrations() if migrations is None else migrations
    for migration in wanted:
        try:
            if await _apply(pool, migration):
                applied.append(migration.name)
        except asyncpg.InsufficientResourcesError as error:
            raise MigrationError(
                f"cannot migrate: nothing of {migration.name} was applied, because {error}; give"
                " Postgres more space (or what else it lacks) and start again"
            ) from error
    await _refuse_newer(pool, wanted)
    if migrations is None:
        await _refuse_missing(pool)
    return applied


async def _apply(pool: Pool, migration: Migration) -> bool:
    """Apply a migration in one transaction; return False if the database has it already."""
    async with transaction(pool) as connection:
        await connection.execute(
            f"SET LOCAL client_connection_check_interval = '{CLIENT_CHECK_S}s'"
        )
        # A second runner waits for the lock and then finds the work done.
        await _lock(connection)
        await connection.execute(_TABLE)
        known = await connection.fetchrow(
            "SELECT name, sha256 FROM migration WHERE number = $1", migration.number
        )
        if known is not None:
            if known["sha256"] != migration.sha256:
                raise MigrationError(
                    f"cannot migrate: {migration.name} was applied with other contents; an "
                    "applied migration is never edited, add a new one"
                )
            return False
        try:
            await connection.execute(migration.sql, timeout=MIGRATE_TIMEOUT_S)
        except TimeoutError as error:
            raise MigrationError(
                f"cannot migrate: {migration.name} did not end within {MIGRATE_TIMEOUT_S:g} s; "
                "end the sessions that use its tables (pg_stat_activity) and start again"
            ) from error
        except ALREADY_THERE as error:
            raise MigrationError(
                f"cannot migrate: {migration.name} was not applied, and {error}; {RESTORE_ALL}"
            ) from error
        await connection.execute(
            "INSERT INTO migration (number, name, sha256) VALUES ($1, $2, $3)",
            migration.number,
            migration.name,
            migration.sha256,
        )
    return True


async def _lock(connection: Connection) -> None:
    """Wait until no other runner migrates."""
    try:
        await connection.execute(
            "SELECT pg_advisory_xact_lock($1)", MIGRATE_LOCK, timeout=MIGRATE_TIMEOUT_S
        )
    except TimeoutError as error:
        raise MigrationError(
            f"cannot migrate: another scheduler has been migrating for {MIGRATE_TIMEOUT_S:g} s; "
            "wait until it serves, or end its session (pg_stat_activity), and start again"
        ) from error


async def _refuse_newer(pool: Pool, wanted: tuple[Migration, ...]) -> None:
    async with transaction(pool) as connection:
        newest = await connection.fetchval("SELECT max(number) FROM migration")
    head = max((migration.number for migration in wanted), default=0)
    if (newest or 0) > head:
        raise MigrationError(
            f"cannot run: the database is at migration {newest}, this release ends at {head}; "
            "run the newer release"
        )


async def _refuse_missing(pool: Pool) -> None:
    """Raise MigrationError if a table of this release is missing, or the cluster of known nodes."""
    schema = (FOLDER / "schema.sql").read_text()
    tables = re.findall(r"^CREATE TABLE (\w+)", schema, re.MULTILINE)
    async with transaction(pool) as connection:
        rows = await connection.fetch(
            "SELECT name FROM unnest($1::text[]) name WHERE to_regclass(name) IS NULL", tables
        )
        missing = ", ".join(row["name"] for row in rows)
        # Another cluster would be created, which no node or router follows.
        if not missing and await connection.fetchval(
            "SELECT EXISTS (SELECT FROM node) AND NOT EXISTS (SELECT FROM cluster)"
        ):
            missing = "the row of cluster"
    if missing:
        raise MigrationError(f"cannot run: the database lacks {missing}; {RESTORE_ALL}")
