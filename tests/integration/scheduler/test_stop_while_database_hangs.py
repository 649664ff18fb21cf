"""A scheduler that is stopped while its database hangs ends all the same, and in order."""

import asyncio
import gc
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from scheduler import app
from scheduler.config import SchedulerConfig
from scheduler.state.scheduler_state import SchedulerState
from scheduler.store import pool as pools
from tests.chaos.cable import a_cable
from tests.system.harness import until

SOCKET = ".s.PGSQL.5432"


async def test_a_scheduler_stops_while_its_database_hangs(
    database_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "STATEMENT_TIMEOUT_S", 1.0)
    made: list[SchedulerState] = []

    class WatchedState(SchedulerState):
        def __init__(self, **parts: object) -> None:
            super().__init__(**parts)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(app, "SchedulerState", WatchedState)
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "token").chmod(0o600)
    real = Path(parse_qs(urlsplit(database_dsn).query)["host"][0])
    # The path of a Unix socket is limited to about a hundred characters.
    with tempfile.TemporaryDirectory() as between:
        async with a_cable(real / SOCKET, at=Path(between) / SOCKET) as cable:
            config = SchedulerConfig(
                name="s1",
                database_url=database_dsn.replace(str(real), between),
                authority=tmp_path / "ca",
                admin_token_file=tmp_path / "token",
                admin_port=0,
                control_port=0,
                # So often that some job is always querying the database.
                lease_renew_s=0.1,
                place_interval_s=0.1,
                publish_interval_s=0.1,
                roll_interval_s=0.1,
            )
            stopping = asyncio.Event()
            serving = asyncio.create_task(app.serve(config, stopping))

            async def is_acting() -> bool:
                return bool(made) and made[0].lease.is_acting and made[0].routes.table is not None

            try:
                await until("acting", is_acting, 20.0)
                cable.down.hold()
                attempted_at = made[0].lease.last_attempt_at

                async def is_asking() -> bool:
                    return made[0].lease.last_attempt_at > attempted_at

                await until("a job queries the database", is_asking, 5.0)
                stopping.set()
                async with asyncio.timeout(30):
                    assert await serving == 0
            finally:
                serving.cancel()
                await asyncio.wait({serving}, timeout=20.0)
                gc.enable()
