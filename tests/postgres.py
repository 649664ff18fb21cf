"""The server that tests share: the embedded launcher, in a folder that its user can reach."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from scheduler.embedded_postgres import EmbeddedPostgres

MEMORY_BYTES_MIN: Final = 3 << 30


class Server(NamedTuple):
    """A running server and its folder."""

    postgres: EmbeddedPostgres
    folder: Path

    def dsn(self, database: str) -> str:
        """Return how to reach one of its databases."""
        return f"postgresql://isochrone@/{database}?host={self.folder / 'pg'}"


def a_folder(prefix: str) -> Path:
    """Make a folder with a short path that Postgres's user can reach; in memory if there is room.

    A database is copied for each test, and a disk that others use takes a second for it.
    """
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_BYTES_MIN
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=memory if has_room else "/var/tmp"))
    folder.chmod(0o755)
    return folder


def start_server() -> Server:
    """Start a server in a folder of its own."""
    folder = a_folder("isochrone-test-")
    postgres = EmbeddedPostgres(folder / "pg", fsync=False)
    asyncio.run(postgres.start())
    return Server(postgres, folder)


def stop_server(server: Server) -> None:
    """Stop it and remove its folder."""
    asyncio.run(server.postgres.stop())
    shutil.rmtree(server.folder, ignore_errors=True)
