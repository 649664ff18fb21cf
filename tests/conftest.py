"""Fixtures for all tests: a real Postgres, and a fresh database in it."""

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from scheduler.store.lease import TTL_S
from scheduler.store.migrate import migrate
from scheduler.store.pool import Pool, open_pool
from tests.postgres import Server, start_server, stop_server
from tests.system.harness import STANDING

# No deadline per example: a shared machine may stall.
settings.register_profile(
    "in its time", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("in its time")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without looking for garbage, a third of the CPU time that this would take.

    Later collections need not walk these objects, nearly all of which stay.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the running fleets to the report of a failed test."""
    report = yield
    if report.failed:
        report.sections += [("Fleet logs", fleet.last_words()) for fleet in STANDING]
    return report


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the whole run, without fsync."""
    server = start_server()
    yield server
    stop_server(server)


@pytest.fixture(scope="session")
def template_database(postgres_server: Server) -> str:
    """A database with every migration applied, used as a template."""

    async def make() -> str:
        name = "template_head"
        connection = await asyncpg.connect(postgres_server.dsn("isochrone"))
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        pool = await open_pool(postgres_server.dsn(name))
        await migrate(pool)
        await pool.close()
        return name

    return asyncio.run(make())


@pytest.fixture
async def database_dsn(postgres_server: Server, template_database: str) -> AsyncIterator[str]:
    """A fresh database with all migrations, dropped after the test."""
    name = f"test_{secrets.token_hex(6)}"
    connection = await asyncpg.connect(postgres_server.dsn("isochrone"))
    await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template_database}")
    yield postgres_server.dsn(name)
    await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await connection.close()


@pytest.fixture
async def pool(database_dsn: str) -> AsyncIterator[Pool]:
    """A pool on a fresh database."""
    opened = await open_pool(database_dsn, size_max=5)
    yield opened
    await opened.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A short folder for sockets and state: a Unix socket's path is limited."""
    return tmp_path


@pytest.fixture(scope="session")
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
