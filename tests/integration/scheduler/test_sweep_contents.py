"""Contents that a scheduler stored before it died, without their row, are deleted in the end."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from isochrone.wire.ids import ClusterId
from scheduler.decide.unnamed_contents import (
    AGE_MIN_S,
    FOREIGN_MIN,
    MARK,
    MarkedByOthers,
    MostlyUnnamed,
)
from scheduler.loops import sweep_contents
from scheduler.loops.sweep_contents import SweepContents, SweptCounts
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.files.batch_results import result_file_ids
from scheduler.store.client_objects.adapters import (
    AdapterFile,
    StoredAdapter,
    add_adapter,
    set_files,
)
from scheduler.store.client_objects.batch_files import add_file
from scheduler.store.client_objects.batches import add_batch
from scheduler.store.pool import Pool, transaction
from tests.builders import a_model
from tests.integration.scheduler.s3_server import Server, server
from tests.integration.scheduler.test_batch_bucket import a_bucket
from tests.integration.scheduler.test_quotas import KEY, with_key

__all__ = ["server", "with_key"]

OLD_S = AGE_MIN_S + 3600.0
OWN = ClusterId("ours")


def file_id(number: int, kind: str = "file") -> str:
    return f"{kind}-{number:024x}"


class Sweeps:
    """The job under test, with its folder and database."""

    def __init__(self, pool: Pool, folder: BatchFolder) -> None:
        self.pool, self.folder = pool, folder
        self.lease = SimpleNamespace(is_acting=True)
        self.job = SweepContents(
            pool=pool,
            lease=self.lease,  # type: ignore[arg-type]
            folder=folder,
            cluster_id=OWN,
        )

    async def write(self, *names: str) -> None:
        """Store contents without a row, as a scheduler that then dies does."""

        def write(name: str) -> None:
            with self.folder.writing(name) as output:
                output.write(name.encode())

        for name in names:
            await asyncio.to_thread(write, name)

    async def names(self) -> list[str]:
        found = await asyncio.to_thread(self.folder.list_contents, "", 1000)
        names = [contents.file_id for contents in found]
        return [name for name in names if not name.startswith(MARK)]

    async def add_rows(self, *names: str) -> None:
        async with transaction(self.pool) as connection:
            for name in names:
                await add_file(
                    connection,
                    file_id=name,
                    tenant_id="acme",
                    purpose="batch",
                    filename="a",
                    size_bytes=1,
                    expires_after_s=None,
                )

    async def add_adapter(self, name: str) -> None:
        """Add an adapter with one file."""
        adapter = StoredAdapter(
            adapter_id="ft-1",
            tenant_id="acme",
            name="mine",
            description="",
            model_id=a_model().model_id,
            model_name="m",
            is_public=False,
            rank=0,
            files=(),
            source="",
            digest=None,
            created_at=0.0,
            modified_at=0.0,
        )
        file = AdapterFile(path="a", size_bytes=1, sha256="a" * 64, file_id=name)
        async with transaction(self.pool) as connection:
            added = await add_adapter(connection, adapter)
            assert added is not None
            await set_files(connection, added, (file,), 0)

    async def add_open_batch(self, batch_id: str, input_file_id: str) -> None:
        async with transaction(self.pool) as connection:
            await add_batch(
                connection,
                batch_id=batch_id,
                tenant_id="acme",
                key_id=KEY,
                endpoint="/v1/chat/completions",
                input_file_id=input_file_id,
                metadata={},
                expires_after_s=3600,
            )


@pytest.fixture
def sweeps(with_key: Pool, tmp_path: Path) -> Sweeps:
    """A folder with an old mark of this cluster."""
    (tmp_path / (MARK + OWN)).touch()
    age(tmp_path, [MARK + OWN])
    return Sweeps(with_key, BatchFolder(tmp_path))


def age(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        os.utime(folder / name, (time.time() - OLD_S,) * 2)


async def test_only_old_contents_without_a_row_are_deleted(sweeps: Sweeps, tmp_path: Path) -> None:
    stored, young, lost = file_id(1), file_id(2), [file_id(3), file_id(4, "adapter")]
    adapter, results = file_id(5, "adapter"), result_file_ids("batch_1")
    foreign = ["notes.txt", "file-7", f"{file_id(6)}.0a1b2c3d.part"]
    await sweeps.add_rows(stored)
    await sweeps.add_adapter(adapter)
    await sweeps.add_open_batch("batch_1", stored)
    old = [stored, adapter, *results, *lost, *foreign]
    (tmp_path / file_id(8)).mkdir()
    await sweeps.write(young, *old)
    age(tmp_path, [*old, file_id(8)])
    sweeps.lease.is_acting = False
    assert await sweeps.job.run_once() == SweptCounts()
    sweeps.lease.is_acting = True
    assert await sweeps.job.run_once() == SweptCounts(listed=len(old) + 2, deleted=2)
    assert set(await sweeps.names()) == {young, *old} - set(lost)
    assert (await sweeps.job.run_once()).deleted == 0


async def test_a_turn_has_limits_and_the_next_goes_on(
    sweeps: Sweeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_contents, "LISTED_MAX", 4)
    monkeypatch.setattr(sweep_contents, "DELETED_MAX", 2)
    monkeypatch.setattr(sweep_contents, "CHECKED_MAX", 3)
    names = [file_id(number) for number in range(9)]
    await sweeps.write(*names)
    await sweeps.add_rows(names[1], names[6])
    age(tmp_path, names)
    # Of 0, 1, 2, 3 two are deleted; then of 3, 4, 5, 6; of 5, 6, 7, 8; and of 8 and the mark.
    turns = [await sweeps.job.run_once() for _ in range(4)]
    assert turns == [SweptCounts(4, 2), SweptCounts(4, 2), SweptCounts(4, 2), SweptCounts(2, 1)]
    assert await sweeps.names() == [names[1], names[6]]
    assert await sweeps.job.run_once() == SweptCounts(3, 0)


async def test_clusters_that_share_a_folder_delete_nothing(with_key: Pool, tmp_path: Path) -> None:
    """The rows of the other one are in its own database."""
    sweeps = Sweeps(with_key, BatchFolder(tmp_path))
    lost = file_id(1)
    await sweeps.write(lost)
    age(tmp_path, [lost])
    for _ in range(2):
        assert await sweeps.job.run_once() == SweptCounts(), "others have not seen the mark"
    age(tmp_path, [MARK + OWN])
    other = MARK + "theirs"
    (tmp_path / other).touch()
    with pytest.raises(MarkedByOthers, match=other):
        await sweeps.job.run_once()
    assert await sweeps.names() == [lost]
    (tmp_path / other).unlink()
    assert (await sweeps.job.run_once()).deleted == 1


async def test_a_database_without_the_rows_deletes_nothing(sweeps: Sweeps, tmp_path: Path) -> None:
    """It is new, or a part of a backup, or the folder is another cluster's."""
    names = [file_id(number) for number in range(FOREIGN_MIN)]
    for name in names:
        (tmp_path / name).touch()
    age(tmp_path, names)
    with pytest.raises(MostlyUnnamed):
        await sweeps.job.run_once()
    assert await sweeps.names() == names


async def test_a_bucket_that_refuses_lists_is_logged_once_and_not_swept(
    with_key: Pool, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Each turn failed, and was logged twice, while everything else worked."""
    sweeps = Sweeps(with_key, a_bucket(server, server.proxy.url))

    def logged() -> int:
        return sum("cannot look for files" in record.message for record in caplog.records)

    for refusals in (1, 2):
        server.proxy.refuses_lists = True
        for _ in range(3):
            assert await sweeps.job.run_once() == SweptCounts()
        assert logged() == refusals
        # The operator permits it, and forbids it again.
        server.proxy.refuses_lists = False
        assert await sweeps.job.run_once() == SweptCounts()
    assert len(caplog.records) == 2


@pytest.mark.parametrize("is_listed_after", [True, False], ids=["rclone", "without start-after"])
async def test_a_bucket_is_swept_too(
    with_key: Pool, server: Server, monkeypatch: pytest.MonkeyPatch, is_listed_after: bool
) -> None:
    """The time of its objects is the store's: all are new until history has advanced."""
    bucket = a_bucket(server)
    sweeps = Sweeps(with_key, bucket)
    if not is_listed_after:
        listing = bucket._obstore.list
        monkeypatch.setattr(bucket._obstore, "list", lambda store, offset: listing(store))
    monkeypatch.setattr(sweep_contents, "LISTED_MAX", 2)
    stored, lost = [file_id(1), file_id(2)], [file_id(3), file_id(4)]
    await sweeps.write(*stored, *lost, "notes.txt")
    await sweeps.add_rows(*stored)
    for _ in range(3):
        assert (await sweeps.job.run_once()).deleted == 0
    async with transaction(with_key) as connection:
        await connection.execute(
            "UPDATE history_clock SET at = now() + $1 * interval '1 second'", OLD_S
        )
    turns = [await sweeps.job.run_once() for _ in range(3)]
    assert sum(turn.deleted for turn in turns) == 2
    assert await sweeps.names() == [*stored, "notes.txt"]
