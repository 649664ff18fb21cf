"""The server that tests share: the embedded launcher, in a folder that its user can reach."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from scheduler.embedded_postgres import EmbeddedPostgres


class Server(NamedTuple):
    """A running server and its folder."""

    postgres: EmbeddedPostgres
    folder: Path

    def dsn(self, database: str) -> str:
        """Return how to reach one of its databases."""
        return f"postgresql://isochrone@/{database}?host={self.folder / 'pg'}"


def start_server() -> Server:
    """Start a server in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="isochrone-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    postgres = EmbeddedPostgres(folder / "pg", fsync=False)
    asyncio.run(postgres.start())
    return Server(postgres, folder)


def stop_server(server: Server) -> None:
    """Stop it and remove its folder."""
    asyncio.run(server.postgres.stop())
    shutil.rmtree(server.folder, ignore_errors=True)
