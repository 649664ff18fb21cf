"""A scheduler with unusable settings says why it does not start."""

import asyncio
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from isochrone.service.clock import utc_now
from isochrone.service.config import ConfigError
from isochrone.service.files import write_atomic
from isochrone.service.trust.identity import AUTHORITY_LIFETIME_DAYS, Authority
from scheduler import batch_storage
from scheduler.app import serve
from scheduler.config import SchedulerConfig
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.pool import Pool, using


async def started(
    dsn: str, folder: Path, authority: str = "ca", *, batch_folder: Path | None = None
) -> int:
    """Start a scheduler, and stop it as soon as it serves."""
    write_atomic(folder / "token", b"0123456789abcdef-admin")
    config = SchedulerConfig(
        name="s1",
        database_url=dsn,
        authority=folder / authority,
        admin_token_file=folder / "token",
        admin_port=0,
        control_port=0,
        batch_folder=batch_folder,
    )
    stopping = asyncio.Event()
    stopping.set()
    return await serve(config, stopping)


async def test_a_scheduler_with_another_authority_does_not_start(
    database_dsn: str, pool: Pool, tmp_path: Path
) -> None:
    assert await started(database_dsn, tmp_path, "ca") == 0
    with pytest.raises(ConfigError, match="copy the folder of a scheduler that has it"):
        await started(database_dsn, tmp_path, "its own")
    shutil.rmtree(tmp_path / "its own")
    shutil.copytree(tmp_path / "ca", tmp_path / "its own")
    assert await started(database_dsn, tmp_path, "its own") == 0
    # The authority's key was lost: an operator clears the recorded fingerprint.
    async with using(pool) as connection:
        await connection.execute("UPDATE cluster SET authority = ''")
    assert await started(database_dsn, tmp_path, "new") == 0


async def test_an_expired_authority_is_reported(
    database_dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was restored from an old copy. Peers only see that some certificate has expired."""
    created_at = utc_now() - timedelta(days=AUTHORITY_LIFETIME_DAYS + 1)
    Authority.create(tmp_path / "ca", "isochrone", created_at)
    assert await started(database_dsn, tmp_path) == 0
    assert "the cluster's authority has expired" in caplog.messages


async def test_an_unreadable_authority_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot use the authority in .*: File name too long"):
        await started("", tmp_path, "x" * 300)


async def test_an_unusable_database_is_reported(
    database_dsn: str, pool: Pool, tmp_path: Path
) -> None:
    for wrong, words in (
        (database_dsn.replace("/test_", "/lacks_"), 'database "lacks_.*" does not exist'),
        (database_dsn.replace("isochrone@", "nobody@"), 'role "nobody" does not exist'),
        ("postgresql://isochrone@127.0.0.1:1/isochrone", "Connect call failed"),
    ):
        with pytest.raises(ConfigError, match=f"cannot use the database: .*{words}"):
            await started(wrong, tmp_path)
    async with using(pool) as connection:
        await connection.execute("INSERT INTO migration VALUES (999, '999_later', 'x')")
    with pytest.raises(ConfigError, match="run the newer release"):
        await started(database_dsn, tmp_path)
    async with using(pool) as connection:
        await connection.execute("DROP TABLE migration CASCADE")
    with pytest.raises(ConfigError, match='"cluster" already exists'):
        await started(database_dsn, tmp_path)


async def test_a_scheduler_starts_while_the_folder_of_files_hangs(
    database_dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file system of another host may hang for hours; schedulers serve everything else."""
    may_end, is_daemon = threading.Event(), list[bool]()

    def hang(_: BatchFolder) -> None:
        is_daemon.append(threading.current_thread().daemon)
        may_end.wait(60)

    monkeypatch.setattr(BatchFolder, "prepare", hang)
    monkeypatch.setattr(batch_storage, "PREPARE_TIMEOUT_S", 0.05)
    try:
        async with asyncio.timeout(30):
            assert await started(database_dsn, tmp_path, batch_folder=tmp_path / "files") == 0
    finally:
        may_end.set()
    assert "cannot reach the place of files" in caplog.text
    assert is_daemon == [True], "its process would not end before the folder answers"
