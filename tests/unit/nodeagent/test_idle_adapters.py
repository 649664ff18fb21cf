"""Files of LoRA adapters leave a node some time after their last use; others stay."""

import asyncio
import hashlib
import os
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from isochrone.wire.ids import ModelId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile
from isochrone.wire.peers.adapter import ADAPTER_FILES, RequestAdapter
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from nodeagent.host.engines.engine_adapters import FETCHES_MAX, AdapterFetcher, EngineAdapters
from nodeagent.loops.delete_idle_adapters import DeleteIdleAdapters

LAST_USE = 1_000_000.0
IDLE_S = 100.0


def an_artifact(folder: Path, name: str, paths: tuple[str, ...] = ADAPTER_FILES) -> Artifact:
    """Write the files of an artifact to `name` in a folder."""
    source = folder / name
    source.mkdir()
    files = []
    for path in paths:
        body = f"{name} {path}".encode()
        (source / path).write_bytes(body)
        digest = hashlib.sha256(body).hexdigest()
        files.append(ArtifactFile(path=path, size_bytes=len(body), sha256=digest))
    return Artifact(
        source=f"file:{source}", files=tuple(files), digest=manifest_digest(tuple(files))
    )


def named(artifact: Artifact) -> RequestAdapter:
    return RequestAdapter(adapter_id="ft-1", model_id=ModelId("m"), artifact=artifact)


class Node:
    """A node's store of artifacts, the adapters of its one replica, and the job."""

    def __init__(self, folder: Path, idle_s: float = IDLE_S) -> None:
        self.folder = folder
        self.now = LAST_USE + IDLE_S + 1
        self.store = ArtifactStore(
            folder / "artifacts",
            ArtifactSources(private=True, hf_url=""),
            1 << 30,
            link=TransferLink(0, monotonic),
        )
        self.adapters = EngineAdapters()
        self.model = SimpleNamespace(digest="")
        replica = SimpleNamespace(spec=SimpleNamespace(artifact=self.model), adapters=self.adapters)
        supervisor: Any = SimpleNamespace(replicas={"r": replica})
        self.job = DeleteIdleAdapters(supervisor, self.store, idle_s, lambda: self.now)

    async def fetched(self, name: str, paths: tuple[str, ...] = ADAPTER_FILES) -> Artifact:
        """Fetch an artifact, last used at LAST_USE."""
        artifact = an_artifact(self.folder, name, paths)
        await self.ensure(artifact)
        os.utime(self.store._folder / artifact.digest, (LAST_USE, LAST_USE))
        return artifact

    async def ensure(self, artifact: Artifact) -> Path:
        return await self.store.ensure(artifact, tuple, lambda _: None)


async def test_an_idle_adapter_is_deleted_and_fetched_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    adapter = await node.fetched("adapter")
    model = await node.fetched("model", ("config.json", "model.safetensors"))
    node.now = LAST_USE + IDLE_S
    assert await node.job.run_once() == 0
    node.now += 1
    assert await node.job.run_once() == 1
    assert node.store.digests() == (model.digest,)
    assert await node.job.run_once() == 0
    folder = await node.ensure(adapter)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ADAPTER_FILES)
    # It was used now.
    assert await node.job.run_once() == 0


async def test_what_is_in_use_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    adapter = await node.fetched("adapter")
    node.model.digest = adapter.digest
    assert await node.job.run_once() == 0
    node.model.digest = ""

    async def fetch(_: RequestAdapter) -> Path:
        # A clock that jumped: its last use looks long ago although a request needs it.
        return node.store._folder / adapter.digest

    async with node.adapters.fetched(named(adapter), fetch):
        assert await node.job.run_once() == 0
    assert await node.job.run_once() == 1


@pytest.mark.parametrize(("idle_s", "deleted"), [(0.0, 0), (1.0, 1)])
async def test_an_operator_may_keep_them(tmp_path: Path, idle_s: float, deleted: int) -> None:
    node = Node(tmp_path, idle_s)
    await node.fetched("adapter")
    assert await node.job.run_once() == deleted


class StuckStore(ArtifactStore):
    """A store whose fetches from `stuck` sources never end."""

    def __init__(self, folder: Path) -> None:
        sources = ArtifactSources(private=True, hf_url="")
        super().__init__(folder, sources, 1 << 30, link=TransferLink(0, monotonic))
        self.fetching: asyncio.Queue[str] = asyncio.Queue()

    async def _fetch_files(self, artifact: Artifact, *rest: Any) -> None:
        if "stuck" in artifact.source:
            self.fetching.put_nowait(artifact.source)
            await asyncio.Event().wait()
        await super()._fetch_files(artifact, *rest)


async def test_adapters_that_are_here_do_not_wait_for_those_that_are_fetched(
    tmp_path: Path,
) -> None:
    """A few adapters with a slow holder, or one that many requests named, stopped all others."""
    store = StuckStore(tmp_path / "artifacts")
    fetcher = AdapterFetcher(store, tuple)
    here = named(an_artifact(tmp_path, "here"))
    await fetcher.fetch(here)
    stuck = [named(an_artifact(tmp_path, f"stuck {number}")) for number in range(FETCHES_MAX + 1)]
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(fetcher.fetch(stuck[0])) for _ in range(2 * FETCHES_MAX)]
        await store.fetching.get()
        await fetcher.fetch(named(an_artifact(tmp_path, "other")))
        waiting += [tasks.create_task(fetcher.fetch(adapter)) for adapter in stuck[1:]]
        for _ in range(FETCHES_MAX - 1):
            await store.fetching.get()
        folder = await fetcher.fetch(here)
        assert folder.name == here.artifact.digest
        for task in waiting:
            task.cancel()
    # No more than that many are fetched at once.
    assert store.fetching.empty()


class FullSlots(asyncio.Semaphore):
    """The places of fetches, that say when a fetch waits for one."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.is_awaited = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        self.is_awaited.set()
        return await super().acquire()


async def test_what_is_pinned_while_a_fetch_waits_is_not_deleted_for_it(tmp_path: Path) -> None:
    """Its pins were those of the moment when it was requested: an hour ago, for a large model."""
    kept, other = an_artifact(tmp_path, "kept"), an_artifact(tmp_path, "other")
    store = ArtifactStore(
        tmp_path / "artifacts",
        ArtifactSources(private=True, hf_url=""),
        kept.size_bytes + other.size_bytes - 1,
        link=TransferLink(0, monotonic),
    )
    pinned: list[str] = []
    fetcher = AdapterFetcher(store, lambda: tuple(pinned))
    await fetcher.fetch(named(kept))
    slots = fetcher._slots = FullSlots(0)
    fetching = asyncio.create_task(fetcher.fetch(named(other)))
    async with asyncio.timeout(5.0):
        await slots.is_awaited.wait()
        pinned.append(kept.digest)
        slots.release()
        with pytest.raises(ArtifactError, match="do not fit"):
            await fetching
    assert store.digests() == (kept.digest,)
