"""Full or read-only disks: serving continues, nothing acknowledged is lost, and errors say why.

And when the disk takes things again, everything is as if it always had, with nobody's help.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp
import pytest

from isochrone.service.files import write_atomic
from isochrone.service.trust.tls import client_context
from isochrone.wire.ids import BootId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile, EngineSettings
from isochrone.wire.peers.control import Register
from isochrone.wire.peers.usage import Usage
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from nodeagent.host.assignment_file import AssignmentFile
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.devices import DeviceReader
from nodeagent.host.engines import engine_process as engines
from nodeagent.host.engines import engine_record
from nodeagent.node import NodeState
from router.app import open_router
from scheduler.embedded_postgres import EmbeddedPostgres
from scheduler.store.migrate import Migration, MigrationError, migrate
from scheduler.store.pool import UNAVAILABLE, open_pool, transaction
from tests.builders import a_spec
from tests.chaos.disk import Disk, a_disk
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_route, a_table, an_identity
from tests.integration.router.test_process import BODY, a_process, prepare
from tests.integration.router.test_route_tables import a_scheduler, ask, until_generation
from tests.postgres import a_folder
from tests.unit.nodeagent.test_decide import an_assignment

DISK_BYTES = 1 << 21
UPGRADE = tuple(
    Migration(n, f"000{n}_copy", f"CREATE TABLE copy_{n} AS SELECT generate_series(1, {rows}) AS n")
    for n, rows in ((1, 1), (2, 100_000))
)
"""Migrations of which the second one needs more space than a full disk has."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with a_disk(tmp_path / "disk", DISK_BYTES) as made:
        yield made


def requests_in(batches: Iterable[Usage]) -> set[str]:
    return {row.request_id for batch in batches for row in batch.rows}


async def test_a_router_with_a_full_disk_keeps_serving_and_loses_no_usage(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(disk.folder, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, an_identity(tmp_path)) as router:
            await scheduler.until(Register, 1)
            await scheduler.send(a_table([a_route(node)]))
            await until_generation(router, 1)
            assert await ask(router) == 200
            await scheduler.until(Usage, 1)
            disk.fill()
            for _ in range(40):
                assert await ask(router) == 200
            await scheduler.send(a_table([a_route(node)], generation=2))
            await until_generation(router, 2)
            await router.loops["usage"].wait_turns(3)
            assert len(requests_in(scheduler.of(Usage))) == 1
            disk.free()
            async with asyncio.timeout(30):
                while len(requests_in(scheduler.of(Usage))) < 41:
                    await scheduler.until(Usage, len(scheduler.of(Usage)) + 1)
            async with asyncio.timeout(30):
                while list((disk.folder / "state" / "usage").glob("*.usage")):
                    await router.loops["usage"].wait_turns(1)
            left = list((disk.folder / "state" / "journal").iterdir())
            assert len(left) == 1, "one journal is in use, and no other is kept"
        assert len(scheduler.of(Register)) == 1, "its conversation never broke"
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("cannot journal usage" in text for text in told)
    assert len(told) < 20, "said once for each reason, not once a request or turn"


@pytest.mark.parametrize("fault", ["full", "read-only"])
async def test_a_router_starts_and_serves_from_a_read_only_disk(disk: Disk, fault: str) -> None:
    node = FakeNode()
    async with open_node(node), aiohttp.ClientSession() as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        config, port = prepare(disk.folder, node)
        config.write_text(config.read_text().replace("processes = 1", "processes = 2"))
        async with a_process(config, port) as process:
            # A life before, in which every folder was made.
            worker = disk.folder / "state" / "worker-1" / "usage"
            async with asyncio.timeout(30):
                while not worker.exists():
                    await asyncio.sleep(0.05)
            process.terminate()
            assert await process.wait() == 0
        if fault == "full":
            disk.fill()
        else:
            disk.set_read_only(True)
        async with a_process(config, port) as process:
            for _ in range(20):
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                async with http.post(url, json=BODY) as response:
                    assert response.status == 200
            async with http.get(f"http://127.0.0.1:{port}/metrics") as response:
                assert response.status == 200
            assert process.returncode is None


def test_tls_needs_no_disk(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node or router that restarts while every disk is full has its certificate, as before."""
    identity = an_identity(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(disk.folder))
    disk.fill()
    assert client_context(identity).get_ca_certs()


async def test_a_node_accepts_its_assignment_once_the_disk_stores_it(
    disk: Disk, tmp_path: Path
) -> None:
    file = AssignmentFile(disk.folder)
    identity = an_identity(tmp_path)
    node = NodeState(identity, BootId("b"), file, DeviceReader(1 << 30), CacheSalts(bytes(32)))
    first, second = (
        an_assignment(generation=n, node=identity.name, cluster=identity.cluster_id) for n in (1, 2)
    )
    assert not await node.accept(first)
    disk.fill()
    assert "cannot store generation 2 on disk: No space left" in await node.accept(second)
    assert node.assignment == file.read() == first
    await node.retry_unsaved()
    assert node.assignment == first
    disk.free()
    await node.retry_unsaved()
    assert node.assignment == file.read() == second


async def test_an_engine_without_a_record_on_disk_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk fills while an engine starts, no later agent could find it, so it is killed."""
    original = write_atomic

    def fail_for_record(path: Path, data: bytes) -> None:
        if path.name == "process.json":
            raise OSError(28, "No space left on device")
        original(path, data)

    monkeypatch.setattr(engine_record, "write_atomic", fail_for_record)
    started = engines.EngineProcesses(tmp_path / "engines", 1)
    engine = EngineSettings(driver="mock", kv_memory_bytes=1)
    with pytest.raises(OSError, match="No space left"):
        await started.start(a_spec("r-orphan", engine=engine), tmp_path)
    assert not [pid for pid in running() if b"r-orphan" in pid]


def running() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


async def test_an_artifact_that_does_not_fit_is_fetched_once_there_is_space(
    disk: Disk, tmp_path: Path
) -> None:
    body = os.urandom(DISK_BYTES // 2)
    source = tmp_path / "source"
    source.mkdir()
    (source / "w").write_bytes(body)
    file = ArtifactFile(path="w", size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
    artifact = Artifact(source=f"file:{source}", files=(file,), digest=manifest_digest((file,)))
    store = ArtifactStore(
        disk.folder / "artifacts",
        ArtifactSources(private=True, hf_url=""),
        1 << 30,
        link=TransferLink(0, time.monotonic),
    )
    disk.fill()
    with pytest.raises(ArtifactError, match=r"1048576 more bytes and the disk has 0 free"):
        await store.ensure(artifact, tuple, lambda size: None)
    assert store.digests() == ()
    disk.free()
    # The remains of an abandoned fetch are deleted for a new artifact.
    left = disk.folder / "artifacts" / f"{'0' * 64}.partial"
    left.mkdir()
    (left / "w").write_bytes(bytes(DISK_BYTES * 3 // 4))
    folder = await store.ensure(artifact, tuple, lambda size: None)
    assert (folder / "w").read_bytes() == body
    assert not left.exists()
    shutil.rmtree(folder)
    # A resumed fetch needs only the space of its missing bytes.
    partial = disk.folder / "artifacts" / f"{artifact.digest}.partial"
    partial.mkdir()
    (partial / "w").write_bytes(body[: len(body) // 2])
    disk.fill()
    with (disk.folder / "filler").open("r+b") as filler:
        filler.truncate(filler.seek(0, os.SEEK_END) - len(body) * 3 // 4)
    folder = await store.ensure(artifact, tuple, lambda size: None)
    assert (folder / "w").read_bytes() == body


def test_kv_blocks_that_the_disk_refuses_are_recomputed(disk: Disk) -> None:
    tier = FileTier(disk.folder / "kv", b"m", 100_000, 1 << 20)
    digests = [bytes([n]) * 32 for n in range(3)]
    assert tier.write(digests[0], b"a" * 100_000)
    disk.fill()
    assert not tier.write(digests[1], b"b" * 100_000)
    assert tier.read(digests[0]) == b"a" * 100_000
    assert tier.read(digests[1]) is None
    disk.set_read_only(True)
    assert not tier.write(digests[2], b"c" * 100_000)
    again = FileTier(disk.folder / "kv", b"m", 100_000, 1 << 20)
    assert again.read(digests[0]) == b"a" * 100_000
    disk.set_read_only(False)
    disk.free()
    assert tier.write(digests[1], b"b" * 100_000)
    assert tier.read(digests[1]) == b"b" * 100_000


async def test_a_database_with_a_full_disk_is_unavailable_and_recovers() -> None:
    folder = a_folder("iso-full-")
    shutil.rmtree(folder)
    with a_disk(folder, 128 << 20) as disk:
        postgres = EmbeddedPostgres(folder / "pg", fsync=False)
        await postgres.start()
        try:
            pool = await open_pool(f"postgresql://isochrone@/isochrone?host={folder / 'pg'}")
            async with transaction(pool) as connection:
                await connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
            assert await migrate(pool, UPGRADE[:1]) == ["0001_copy"]
            disk.fill()
            write = "INSERT INTO kept SELECT n FROM generate_series(1, 100000) n"
            with pytest.raises(UNAVAILABLE, match="No space left"):
                async with transaction(pool) as connection:
                    await connection.execute(write)
            async with transaction(pool) as connection:
                assert await connection.fetchval("SELECT count(*) FROM kept") == 1
            # An upgrade of a scheduler says what is lacking, and goes on where it stopped.
            with pytest.raises(MigrationError, match=r"nothing of 0002_copy .* No space left on"):
                await migrate(pool, UPGRADE)
            disk.free()
            assert await migrate(pool, UPGRADE) == ["0002_copy"]
            async with transaction(pool) as connection:
                await connection.execute(write)
            await pool.close()
        finally:
            await postgres.stop()
    shutil.rmtree(folder)
