"""kill -9 of a scheduler while it migrates the database, at several points (P8)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import asyncpg
import pytest

from scheduler.store.migrate import MIGRATE_LOCK, migrate, read_migrations
from scheduler.store.pool import open_pool
from tests.system.harness import Fleet, a_fleet, until

COLUMNS = """
SELECT string_agg(concat_ws(' ', attrelid::regclass, attname, atttypid::regtype), ','
                  ORDER BY attrelid::regclass::text, attname)
FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
WHERE relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped
"""
WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


class Obstacle(NamedTuple):
    """The lock that stops a scheduler at a point of a migration."""

    number: int
    """The migration; those before it are applied."""

    lock: str


OBSTACLES = (
    # Before it: another runner has the lock.
    Obstacle(1, f"SELECT pg_advisory_lock({MIGRATE_LOCK})"),
    # Within its statements.
    Obstacle(10, "LOCK TABLE placement IN ACCESS SHARE MODE"),
    # Between its statements and its record.
    Obstacle(29, "LOCK TABLE migration IN SHARE MODE"),
)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        await running.start_postgres()
        yield running


async def test_a_scheduler_killed_while_it_migrates_leaves_what_the_next_one_finishes(
    fleet: Fleet,
) -> None:
    known = read_migrations()
    watching = await asyncpg.connect(fleet.dsn())
    pool = await open_pool(fleet.dsn(), size_max=1)

    async def waits() -> bool:
        return bool(await watching.fetchval(WAITING))

    async def waits_no_more() -> bool:
        return not await watching.fetchval(WAITING)

    for number, lock in OBSTACLES:
        if earlier := known[: number - 1]:
            await migrate(pool, earlier)
        before = await watching.fetchval(COLUMNS)
        holder = await asyncpg.connect(fleet.dsn())
        await holder.execute("BEGIN")
        await holder.execute(lock)
        starting = asyncio.create_task(fleet.start_scheduler("a"))
        await until(f"the scheduler is stopped in migration {number}", waits)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        await fleet.kill("scheduler-a")
        # Its session ends while its statement still waits.
        await until("nothing is left of it", waits_no_more)
        await holder.close()
        assert await watching.fetchval(COLUMNS) == before
    await pool.close()
    await asyncio.gather(*(fleet.start_scheduler(name) for name in ("a", "b")))

    async def one_acts() -> bool:
        return await fleet.acts("a") or await fleet.acts("b")

    await until("one of two that migrate at the same time acts", one_acts)
    applied = await watching.fetch("SELECT number, name, sha256 FROM migration ORDER BY number")
    assert [tuple(row) for row in applied] == [(one.number, one.name, one.sha256) for one in known]
    await watching.close()
    assert not fleet.processes.ended()
