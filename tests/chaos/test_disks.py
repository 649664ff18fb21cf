"""Disks that are full or read-only: what runs goes on, nothing acknowledged is lost, words say why.

And when the disk takes things again, everything is as if it always had, with nobody's help.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp
import pytest

from isochrone.service.files import write_atomic
from isochrone.wire.artifact import manifest_digest
from isochrone.wire.control import Register
from isochrone.wire.ids import BootId
from isochrone.wire.model import Artifact, ArtifactFile, EngineSettings
from isochrone.wire.usage import Usage
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.host import engines
from nodeagent.host.artifacts import Artifacts
from nodeagent.host.devices import Devices
from nodeagent.host.ledger import Ledger
from nodeagent.host.link import Link
from nodeagent.host.sources import Sources
from nodeagent.host.wanted import ArtifactError
from nodeagent.node import Node
from router.app import open_house
from scheduler.embedded_postgres import EmbeddedPostgres
from scheduler.store.pool import UNAVAILABLE, open_pool, transaction
from tests.builders import a_spec
from tests.chaos.disk import Disk, a_disk
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_route, a_table, an_identity
from tests.integration.router.test_following import a_scheduler, ask, until_generation
from tests.integration.router.test_process import BODY, a_process, prepare
from tests.postgres import a_folder
from tests.unit.nodeagent.test_decide import an_assignment

DISK_BYTES = 1 << 21


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with a_disk(tmp_path / "disk", DISK_BYTES) as made:
        yield made


def requests_in(batches: Iterable[Usage]) -> set[str]:
    return {row.request_id for batch in batches for row in batch.rows}


async def test_a_router_whose_disk_fills_serves_on_and_loses_no_usage(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(disk.folder, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_house(config, an_identity(tmp_path)) as house:
            await scheduler.until(Register, 1)
            await scheduler.say(a_table([a_route(node)]))
            await until_generation(house, 1)
            assert await ask(house) == 200
            await scheduler.until(Usage, 1)
            disk.fill()
            for _ in range(40):
                assert await ask(house) == 200
            await scheduler.say(a_table([a_route(node)], generation=2))
            await until_generation(house, 2)
            await house.loops["usage"].wait_turns(3)
            assert len(requests_in(scheduler.of(Usage))) == 1
            disk.free()
            async with asyncio.timeout(30):
                while len(requests_in(scheduler.of(Usage))) < 41:
                    await scheduler.until(Usage, len(scheduler.of(Usage)) + 1)
            async with asyncio.timeout(30):
                while list((disk.folder / "state" / "usage").glob("*.usage")):
                    await house.loops["usage"].wait_turns(1)
            left = list((disk.folder / "state" / "journal").iterdir())
            assert len(left) == 1, "one journal is in use, and no other is kept"
        assert len(scheduler.of(Register)) == 1, "its conversation never broke"
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("cannot journal usage" in text for text in told)
    assert len(told) < 20, "said once for each reason, not once a request or turn"


@pytest.mark.parametrize("fault", ["full", "read-only"])
async def test_a_router_starts_and_serves_from_a_disk_that_takes_nothing(
    disk: Disk, fault: str
) -> None:
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
            disk.is_read_only(True)
        async with a_process(config, port) as process:
            for _ in range(20):
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                async with http.post(url, json=BODY) as response:
                    assert response.status == 200
            async with http.get(f"http://127.0.0.1:{port}/metrics") as response:
                assert response.status == 200
            assert process.returncode is None


async def test_a_node_takes_its_assignment_when_the_disk_does(disk: Disk, tmp_path: Path) -> None:
    ledger = Ledger(disk.folder)
    identity = an_identity(tmp_path)
    node = Node(identity, BootId("b"), ledger, Devices(1 << 30))
    first, second = (
        an_assignment(generation=n, node=identity.name, cluster=identity.cluster_id) for n in (1, 2)
    )
    assert not await node.take(first)
    disk.fill()
    assert "cannot keep generation 2 on disk: No space left" in await node.take(second)
    assert node.assignment == ledger.read() == first
    await node.take_unkept()
    assert node.assignment == first
    disk.free()
    await node.take_unkept()
    assert node.assignment == ledger.read() == second


async def test_an_engine_that_could_not_be_found_again_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills while it starts: what no later life of the agent knows of must not run."""
    real = write_atomic

    def full_by_then(path: Path, data: bytes) -> None:
        if path.name == "process.json":
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(engines, "write_atomic", full_by_then)
    started = engines.Engines(tmp_path / "engines", 1)
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


async def test_weights_that_do_not_fit_say_so_and_come_when_there_is_room(
    disk: Disk, tmp_path: Path
) -> None:
    body = os.urandom(DISK_BYTES // 2)
    source = tmp_path / "source"
    source.mkdir()
    (source / "w").write_bytes(body)
    file = ArtifactFile(path="w", size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
    artifact = Artifact(source=f"file:{source}", files=(file,), digest=manifest_digest((file,)))
    store = Artifacts(
        disk.folder / "artifacts",
        Sources(private=True, hf_url=""),
        1 << 30,
        link=Link(0, time.monotonic),
    )
    disk.fill()
    with pytest.raises(ArtifactError, match=r"1048576 bytes needed, the disk has 0 free"):
        await store.ensure(artifact, (), lambda size: None)
    assert store.held() == ()
    disk.free()
    # What a fetch left that nobody goes on with makes way.
    left = disk.folder / "artifacts" / f"{'0' * 64}.partial"
    left.mkdir()
    (left / "w").write_bytes(bytes(DISK_BYTES * 3 // 4))
    folder = await store.ensure(artifact, (), lambda size: None)
    assert (folder / "w").read_bytes() == body
    assert not left.exists()
    shutil.rmtree(folder)
    # As much room as the rest takes is enough for the rest.
    partial = disk.folder / "artifacts" / f"{artifact.digest}.partial"
    partial.mkdir()
    (partial / "w").write_bytes(body[: len(body) // 2])
    disk.fill()
    with (disk.folder / "filler").open("r+b") as filler:
        filler.truncate(filler.seek(0, os.SEEK_END) - len(body) * 3 // 4)
    folder = await store.ensure(artifact, (), lambda size: None)
    assert (folder / "w").read_bytes() == body


def test_kv_that_the_disk_does_not_take_is_computed_again(disk: Disk) -> None:
    tier = FileTier(disk.folder / "kv", b"m", 100_000, 1 << 20)
    digests = [bytes([n]) * 32 for n in range(3)]
    assert tier.write(digests[0], b"a" * 100_000)
    disk.fill()
    assert not tier.write(digests[1], b"b" * 100_000)
    assert tier.read(digests[0]) == b"a" * 100_000
    assert tier.read(digests[1]) is None
    disk.is_read_only(True)
    assert not tier.write(digests[2], b"c" * 100_000)
    again = FileTier(disk.folder / "kv", b"m", 100_000, 1 << 20)
    assert again.read(digests[0]) == b"a" * 100_000
    disk.is_read_only(False)
    disk.free()
    assert tier.write(digests[1], b"b" * 100_000)
    assert tier.read(digests[1]) == b"b" * 100_000


async def test_a_database_whose_disk_is_full_is_away_and_comes_back() -> None:
    folder = a_folder("iso-full-")
    folder.rmdir()
    with a_disk(folder, 128 << 20) as disk:
        postgres = EmbeddedPostgres(folder / "pg", fsync=False)
        await postgres.start()
        try:
            pool = await open_pool(f"postgresql://isochrone@/isochrone?host={folder / 'pg'}")
            async with transaction(pool) as connection:
                await connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
            disk.fill()
            write = "INSERT INTO kept SELECT n FROM generate_series(1, 100000) n"
            with pytest.raises(UNAVAILABLE, match="No space left"):
                async with transaction(pool) as connection:
                    await connection.execute(write)
            async with transaction(pool) as connection:
                assert await connection.fetchval("SELECT count(*) FROM kept") == 1
            disk.free()
            async with transaction(pool) as connection:
                await connection.execute(write)
            await pool.close()
        finally:
            await postgres.stop()
    folder.rmdir()
