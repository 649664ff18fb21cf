"""What the tests of schedulers on a real Postgres share."""

import asyncio

import asyncpg
import pytest

from scheduler.store.lease import TTL_S
from tests.postgres import Server


@pytest.fixture(scope="session", autouse=True)
def server_older_than_a_lease(postgres_server: Server) -> None:
    """Wait until the server has run for a TTL: before, no expired lease is taken."""

    async def wait() -> None:
        connection = await asyncpg.connect(postgres_server.dsn("isochrone"))
        age_s = await connection.fetchval(
            "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8"
        )
        await connection.close()
        await asyncio.sleep(max(0.0, TTL_S - age_s) + 0.1)

    asyncio.run(wait())
