"""The launcher of an embedded Postgres is killed, and the next one takes its place."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from scheduler.embedded_postgres import EmbeddedPostgres, PostgresError
from tests.postgres import a_folder
from tests.system.harness import ROOT, until


@pytest.fixture
def folder() -> Iterator[Path]:
    made = a_folder("isochrone-test-")
    yield made
    shutil.rmtree(made)


def launched(state: Path) -> "subprocess.Popen[str]":
    launcher = subprocess.Popen(
        [sys.executable, "-m", "scheduler", "postgres", "--state", str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("postgresql://")
    return launcher


def server_pid(state: Path) -> int:
    return int((state / "data" / "postmaster.pid").read_text().split()[0])


async def test_the_server_of_a_killed_launcher_is_stopped_and_nothing_is_lost(folder: Path) -> None:
    state = folder / "pg"
    first = await asyncio.to_thread(launched, state)
    leftover = server_pid(state)
    server = EmbeddedPostgres(state, fsync=False)
    with pytest.raises(PostgresError, match="another launcher already serves"):
        await server.start()
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE TABLE kept (n int); INSERT INTO kept VALUES (7)")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert Path(f"/proc/{leftover}").exists(), "a killed launcher leaves its server"
    await server.start()
    try:
        assert server.pid != leftover
        again = await asyncpg.connect(server.dsn)
        assert await again.fetchval("SELECT n FROM kept") == 7
        await again.close()
        await connection.close()
    finally:
        await server.stop()


async def test_a_connection_that_outlives_a_killed_server_is_waited_for(folder: Path) -> None:
    """Postgres refuses to start beside it."""
    server = EmbeddedPostgres(folder / "pg", fsync=False)
    await server.start()
    connection = await asyncpg.connect(server.dsn)
    backend = connection.get_server_pid()
    os.kill(backend, signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    await server.stop()
    again = asyncio.create_task(server.start())
    await asyncio.sleep(1.0)
    assert not again.done()
    os.kill(backend, signal.SIGCONT)
    try:
        await again
    finally:
        await server.stop()
        connection.terminate()


async def test_a_pid_that_is_another_process_by_now_is_left_alone(folder: Path) -> None:
    state = folder / "pg"
    server = EmbeddedPostgres(state, fsync=False)
    await server.start()
    await server.stop()
    (state / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    await server.start()

    async def answers() -> bool:
        connection = await asyncpg.connect(server.dsn)
        await connection.close()
        return True

    await until("it answers", answers)
    await server.stop()
