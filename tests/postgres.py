"""The Postgres server that all tests share, in a folder that Postgres's user can access."""

import asyncio
import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from scheduler.embedded_postgres import EmbeddedPostgres

MEMORY_BYTES_MIN: Final = 3 << 30
OWNER: Final = "owner.pid"
"""The file of a folder with the id of the process that made it."""


class Server(NamedTuple):
    """A running server and its folder."""

    postgres: EmbeddedPostgres
    folder: Path

    def dsn(self, database: str) -> str:
        """Return the connection string of one of its databases."""
        return f"postgresql://isochrone@/{database}?host={self.folder / 'pg'}"


def a_folder(prefix: str, *, in_memory: bool = True) -> Path:
    """Create a folder with a short path that Postgres's user can access, in memory if possible.

    Each test copies a database, which takes a second on a busy disk.
    """
    memory = Path("/dev/shm")
    has_space = in_memory and memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_BYTES_MIN
    parent = memory if has_space else Path("/var/tmp")
    remove_orphans(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    (folder / OWNER).write_text(str(os.getpid()))
    folder.chmod(0o755)
    return folder


def remove_orphans(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that were killed before they could."""
    for owner in parent.glob(f"{prefix}*/{OWNER}"):
        with suppress(OSError, ValueError):
            if not Path(f"/proc/{int(owner.read_text())}").exists():
                shutil.rmtree(owner.parent, ignore_errors=True)


def start_server() -> Server:
    """Start a server in a folder of its own."""
    folder = a_folder("isochrone-test-")
    postgres = EmbeddedPostgres(folder / "pg", fsync=False)
    asyncio.run(postgres.start())
    return Server(postgres, folder)


def stop_server(server: Server) -> None:
    """Stop the server and remove its folder."""
    asyncio.run(server.postgres.stop())
    shutil.rmtree(server.folder, ignore_errors=True)


def copy_new_database(state: Path) -> None:
    """Write the state of an embedded Postgres that was started once: initdb takes half a second."""
    subprocess.run(["cp", "-a", _new_database(), state], check=True)


@functools.cache
def _new_database() -> Path:
    """Return the folder that this process copies."""
    folder = a_folder("isochrone-new-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    async def make() -> None:
        postgres = EmbeddedPostgres(folder / "pg")
        await postgres.start()
        await postgres.stop()

    asyncio.run(make())
    return folder / "pg"
