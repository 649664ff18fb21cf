"""A node with `model_signers` has only models that one of them has signed."""

import time
from pathlib import Path

import pytest

from isochrone.cli.manifest import artifact_of, signed
from isochrone.service.trust.model_signature import load_signers
from isochrone.wire.models.model import Artifact
from isochrone.wire.peers.adapter import CLUSTER_SCHEME
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from tests.unit.service.test_model_signature import a_key, a_model, sign


def a_store(folder: Path, *signers: Path) -> ArtifactStore:
    return ArtifactStore(
        folder / "artifacts",
        ArtifactSources(private=True, hf_url=""),
        1 << 30,
        link=TransferLink(0, time.monotonic),
        signers=load_signers(signers),
    )


async def ensure(store: ArtifactStore, artifact: Artifact, *, is_adapter: bool = False) -> Path:
    return await store.ensure(artifact, tuple, lambda _: None, is_adapter=is_adapter)


async def test_a_model_that_nobody_trusted_has_signed_leaves_nothing_on_disk(
    tmp_path: Path,
) -> None:
    model, key, other = a_model(tmp_path), a_key(tmp_path, "acme"), a_key(tmp_path, "other")
    store = a_store(tmp_path, key.with_suffix(".pub"))
    unsigned = artifact_of(model, f"file:{model}")
    foreign = signed(unsigned, sign(model, other))
    from_cluster = Artifact(
        source=f"{CLUSTER_SCHEME}/x", files=unsigned.files, digest=unsigned.digest
    )
    for artifact in (unsigned, foreign, from_cluster):
        with pytest.raises(ArtifactError, match="expected a signature of acme"):
            await ensure(store, artifact)
    assert not list((tmp_path / "artifacts").iterdir())
    path = await ensure(store, signed(unsigned, sign(model, key)))
    assert (path / "vocab.txt").read_bytes() == b"{}"


async def test_files_already_on_disk_are_no_signature(tmp_path: Path) -> None:
    model, key = a_model(tmp_path), a_key(tmp_path, "acme")
    unsigned = artifact_of(model, f"file:{model}")
    await ensure(a_store(tmp_path), unsigned)
    store = a_store(tmp_path, key.with_suffix(".pub"))
    # An adapter's files are no model: its name in a request is what loads them.
    assert (await ensure(store, unsigned, is_adapter=True)).name == unsigned.digest
    with pytest.raises(ArtifactError, match="it is not signed"):
        await ensure(store, unsigned)
