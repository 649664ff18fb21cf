"""Files of LoRA adapters leave a node some time after their last use; others stay."""

import hashlib
import os
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.ids import ModelId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile
from isochrone.wire.peers.adapter import ADAPTER_FILES, RequestAdapter
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from nodeagent.host.engines.engine_adapters import EngineAdapters
from nodeagent.loops.delete_idle_adapters import DeleteIdleAdapters

LAST_USE = 1_000_000.0
IDLE_S = 100.0


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
        source = self.folder / name
        source.mkdir()
        files = []
        for path in paths:
            body = f"{name} {path}".encode()
            (source / path).write_bytes(body)
            digest = hashlib.sha256(body).hexdigest()
            files.append(ArtifactFile(path=path, size_bytes=len(body), sha256=digest))
        artifact = Artifact(
            source=f"file:{source}", files=tuple(files), digest=manifest_digest(tuple(files))
        )
        await self.ensure(artifact)
        os.utime(self.store._folder / artifact.digest, (LAST_USE, LAST_USE))
        return artifact

    async def ensure(self, artifact: Artifact) -> Path:
        return await self.store.ensure(artifact, (), lambda _: None)


async def test_an_idle_adapter_is_deleted_and_fetched_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    adapter = await node.fetched("adapter")
    model = await node.fetched("model", ("config.json", "model.safetensors"))
    node.now = LAST_USE + IDLE_S
    assert (await node.job.run_once()).deleted == 0
    node.now += 1
    assert (await node.job.run_once()).deleted == 1
    assert node.store.digests() == (model.digest,)
    assert (await node.job.run_once()).deleted == 0
    folder = await node.ensure(adapter)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ADAPTER_FILES)
    # It was used now.
    assert (await node.job.run_once()).deleted == 0


async def test_what_is_in_use_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    adapter = await node.fetched("adapter")
    node.model.digest = adapter.digest
    assert (await node.job.run_once()).deleted == 0
    node.model.digest = ""

    async def fetch(_: RequestAdapter) -> Path:
        # A clock that jumped: its last use looks long ago although a request needs it.
        return node.store._folder / adapter.digest

    named = RequestAdapter(adapter_id="ft-1", model_id=ModelId("m"), artifact=adapter)
    async with node.adapters.fetched(named, fetch):
        assert (await node.job.run_once()).deleted == 0
    assert (await node.job.run_once()).deleted == 1


@pytest.mark.parametrize(("idle_s", "deleted"), [(0.0, 0), (1.0, 1)])
async def test_an_operator_may_keep_them(tmp_path: Path, idle_s: float, deleted: int) -> None:
    node = Node(tmp_path, idle_s)
    await node.fetched("adapter")
    assert (await node.job.run_once()).deleted == deleted
