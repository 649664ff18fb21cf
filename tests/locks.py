"""Waits for lock contention in Postgres."""

from scheduler.store.pool import Pool, using
from tests.system.harness import until


async def locked_out(pool: Pool, count: int = 1) -> None:
    """Wait until `count` connections to the pool's database are waiting for a lock."""

    async def are_waiting() -> bool:
        async with using(pool) as connection:
            found: int = await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        return found >= count

    await until(f"{count} wait for a lock", are_waiting, 10.0)
