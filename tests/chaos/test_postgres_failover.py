"""Postgres under load: a standby is promoted, and strangers take every connection or lock tables.

One fleet suffers it all. No request needs the database, no scheduler is started anew, and whatever
was acknowledged is there afterwards.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from isochrone.cli.client import AdminError
from scheduler.embedded_postgres import find_binaries
from tests.chaos.invariants import invariants
from tests.chaos.starvation import all_connections_taken, take_all_connections
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import Load, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

STANDBY = "pg-standby"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        running.databases.append(STANDBY)
        await running.up()
        await running.deploy(replicas=2)
        running.note_baseline()
        yield running


class Operator:
    """Makes keys without a pause, and keeps the ids of those that were acknowledged."""

    def __init__(self, fleet: Fleet) -> None:
        self.acknowledged: list[str] = []
        self.refused: set[str] = set()
        self._fleet = fleet

    async def make_keys(self) -> None:
        """Make keys until cancelled."""
        while True:
            try:
                made = await self._fleet.ask("POST", "/v1/keys", {"tenant_id": "operator"})
                self.acknowledged.append(made["key_id"])
            except AdminError as error:
                self.refused.add(str(error))
            await asyncio.sleep(0.05)

    async def wait_acknowledged(self, more: int) -> None:
        """Wait until `more` further keys are acknowledged."""
        target = len(self.acknowledged) + more

        async def are_acknowledged() -> bool:
            return len(self.acknowledged) >= target

        await until(f"{more} more writes are acknowledged", are_acknowledged)


async def start_standby(fleet: Fleet) -> None:
    """Copy the primary and follow it; from then on it acknowledges only what both have."""
    primary, standby = fleet.folder / "pg", fleet.folder / STANDBY
    owner = primary.stat()
    standby.mkdir(mode=0o700)
    os.chown(standby, owner.st_uid, owner.st_gid)
    command = [
        *(str(find_binaries() / "pg_basebackup"), "-h", str(primary), "-U", "isochrone"),
        *("-D", str(standby / "data"), "-R", "-X", "stream", "-c", "fast"),
    ]
    if not shutil.which(command[0]):
        pytest.skip("needs pg_basebackup")
    await asyncio.to_thread(
        subprocess.run, command, check=True, cwd="/", user=owner.st_uid, group=owner.st_gid
    )
    await fleet.start_postgres(STANDBY)
    connection = await asyncpg.connect(fleet.dsn("pg"))
    await connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    await connection.execute("SELECT pg_reload_conf()")

    async def is_synchronous() -> Any:
        return await connection.fetchval(
            "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        )

    await until("the standby is synchronous", is_synchronous)
    await connection.close()


async def hold_invariants(fleet: Fleet, load: Load, engines: dict[str, int]) -> None:
    await until("both warm", lambda: fleet.is_warm(2))
    assert not load.failures(), load.failures()
    assert fleet.engine_pids() == engines
    await invariants(fleet, load)


async def test_a_promoted_standby_is_found_and_has_what_was_acknowledged(fleet: Fleet) -> None:
    """The primary is killed and its standby promoted; nothing is restarted (P2)."""
    await start_standby(fleet)
    engines, scheduler = fleet.engine_pids(), fleet.processes.pid("scheduler-a")
    operator = Operator(fleet)
    async with under_load(fleet, [*CITIES], streams=4) as load:
        writing = asyncio.create_task(operator.make_keys())
        await operator.wait_acknowledged(5)
        await fleet.kill("postgres")
        await wait_ended(load, 8)
        assert operator.refused and all("unavailable" in text for text in operator.refused)
        connection = await asyncpg.connect(fleet.dsn(STANDBY))
        await connection.execute("SELECT pg_promote()")
        await connection.close()
        await operator.wait_acknowledged(5)
        await until("the scheduler acts", fleet.acts)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        await fleet.routers_know()
        await wait_ended(load, 8)
    stored = {row["key_id"] for row in (await fleet.ask("GET", "/v1/keys"))["data"]}
    assert stored.issuperset(operator.acknowledged)
    assert fleet.processes.pid("scheduler-a") == scheduler and not fleet.processes.ended()
    await hold_invariants(fleet, load, engines)


async def test_a_database_without_free_connections_is_unavailable_and_recovers(
    fleet: Fleet,
) -> None:
    """Strangers take all of `max_connections`; later the scheduler's own are gone too (P6)."""
    engines = fleet.engine_pids()
    before = await fleet.ask("GET", "/v1/status")
    async with under_load(fleet, [*CITIES], streams=4) as load:
        async with all_connections_taken(fleet.dsn()) as crowd:
            await wait_ended(load, 8)
            now = await fleet.ask("GET", "/v1/status")
            assert (now["acting"], now["epoch"]) == (True, before["epoch"])
            # As after a short cut of the network: it must connect anew and cannot.
            scheduler = fleet.processes.pid("scheduler-a")
            os.kill(scheduler, signal.SIGSTOP)
            try:
                own = [connection.get_server_pid() for connection in crowd]
                await crowd[0].execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                    " WHERE backend_type = 'client backend' AND pid <> ALL($1)",
                    own,
                )
                await take_all_connections(fleet.dsn(), crowd)
            finally:
                os.kill(scheduler, signal.SIGCONT)
            with pytest.raises(AdminError, match="unavailable"):
                await fleet.ask("POST", "/v1/keys", {"tenant_id": "refused"})
            await wait_ended(load, 20)
        await until("the scheduler acts again", fleet.acts)
        await wait_ended(load, 8)
    await hold_invariants(fleet, load, engines)


@pytest.mark.parametrize(
    ("table", "logged"),
    [
        ("placement", '"job":"place_replicas"'),
        ("usage", "batch not written"),
        ("lease", '"job":"renew_lease"'),
    ],
)
async def test_a_table_that_a_stranger_has_locked_delays_only_what_needs_it(
    fleet: Fleet, table: str, logged: str
) -> None:
    """As a change of the schema by hand does, or a backup that waits for one (P7)."""
    engines, log = fleet.engine_pids(), fleet.folder / "logs" / "scheduler-a.log"
    before = log.read_text().count(logged)

    async def is_noticed() -> bool:
        return log.read_text().count(logged) > before

    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 4)
        stranger = await asyncpg.connect(fleet.dsn())
        async with stranger.transaction():
            await stranger.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            await until("a statement has waited too long", is_noticed)
            await wait_ended(load, 8)
        await stranger.close()
        await until("the scheduler acts", fleet.acts)
        await fleet.routers_know()
        await wait_ended(load, 8)
    await hold_invariants(fleet, load, engines)
