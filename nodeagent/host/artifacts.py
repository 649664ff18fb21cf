"""Artifacts on this node's disk: fetched, verified, kept under a budget. Nothing else is seen.

A folder per artifact, named by its digest, appears by one rename when every file in it has the size
and SHA-256 of its manifest. Half-fetched files wait in `.partial` and are resumed, from whoever has
them: the source where it is a folder or package of this machine, other nodes, the origin.
"""

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isochrone.service.files import sync
from isochrone.service.threads import run_to_completion
from isochrone.wire.artifact import check_artifact, check_path
from isochrone.wire.model import Artifact
from nodeagent.decide.eviction import Kept, evict
from nodeagent.host.link import Link
from nodeagent.host.peers import Peers
from nodeagent.host.sources import LOCAL, Sources
from nodeagent.host.wanted import ArtifactError, Cut, Wanted

log = logging.getLogger(__name__)

ATTEMPTS_MAX: Final = 5
"""How often an origin that breaks off is asked for a file."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")

Progress = Callable[[int], None]


@dataclass(slots=True)
class _Coming:
    """An artifact on its way here."""

    size_bytes: int
    fetched_bytes: int = 0


class Artifacts:
    """The artifacts below `folder`. One fetch of an artifact at a time; others wait for it."""

    def __init__(
        self,
        folder: Path,
        sources: Sources,
        budget_bytes: int,
        *,
        link: Link,
        peers: Peers | None = None,
    ) -> None:
        """`peers` are asked before the origin; what comes from either comes over `link`."""
        self._folder = folder
        self._sources = sources
        self._budget_bytes = budget_bytes
        self._peers = peers
        self.link = link
        self._fetching: dict[str, asyncio.Lock] = {}
        self._making_room = asyncio.Lock()
        self._coming: dict[str, _Coming] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def held(self) -> tuple[str, ...]:
        """Return the digests of the artifacts that are whole on this disk."""
        return tuple(sorted(p.name for p in self._folder.iterdir() if _is_digest(p.name)))

    def held_file(self, digest: str, path: str) -> Path | None:
        """Return a file of an artifact that is whole on this disk; None where there is none."""
        if not _is_digest(digest) or check_path(path):
            return None
        file = self._folder / digest / path
        return file if file.is_file() and not file.is_symlink() else None

    def fetched_bytes(self, digest: str) -> int | None:
        """Return how much of an artifact is here while it is being fetched; None otherwise."""
        coming = self._coming.get(digest)
        return coming.fetched_bytes if coming else None

    def files_of(self, digest: str) -> list[Path]:
        """Return the files of an artifact that is whole on this disk."""
        return sorted(p for p in (self._folder / digest).rglob("*") if p.is_file())

    def disk_free_bytes(self, pinned: Collection[str]) -> int:
        """Return the bytes that another artifact may take, were all but the `pinned` dropped."""
        kept = self._kept()
        held = sum(artifact.size_bytes for artifact in kept)
        spare = sum(artifact.size_bytes for artifact in kept if artifact.digest not in pinned)
        on_disk = self._free_bytes() + spare
        return max(0, min(on_disk, self._budget_left_bytes() - held + spare))

    async def ensure(
        self,
        artifact: Artifact,
        pinned: Collection[str],
        progress: Progress,
        *,
        bytes_per_s: float = 0.0,
    ) -> Path:
        """Return the artifact's folder, fetching it if need be; raises ArtifactError.

        `pinned` digests are in use and are not dropped to make room. `progress` gets bytes so far.
        It comes so fast at most; 0 is as fast as the link may go.
        """
        problem = check_artifact(artifact)
        if problem:
            raise ArtifactError(problem)
        target = self._folder / artifact.digest
        async with self._fetching.setdefault(artifact.digest, asyncio.Lock()):
            if target.exists():
                await asyncio.to_thread(os.utime, target)
                progress(artifact.size_bytes)
                return target
            try:
                async with self._making_room:
                    await run_to_completion(self._make_room, artifact, pinned)
                    self._coming[artifact.digest] = _Coming(artifact.size_bytes)
                await self._fetch_all(artifact, target, progress, self.link.slower(bytes_per_s))
            except OSError as error:
                raise ArtifactError(
                    f"cannot keep {artifact.source}: {error.strerror or error}"
                ) from error
            finally:
                self._coming.pop(artifact.digest, None)
        return target

    async def _fetch_all(
        self, artifact: Artifact, target: Path, progress: Progress, link: Link
    ) -> None:
        partial = self._folder / f"{artifact.digest}.partial"
        done = 0

        def tell(size: int) -> None:
            self._coming[artifact.digest].fetched_bytes = done + size
            progress(done + size)

        for file in artifact.files:
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            await self._fetch(artifact.source, Wanted(artifact.digest, file, path, tell, link))
            tell(file.size_bytes)
            done += file.size_bytes
        await run_to_completion(_publish, partial, target)

    async def _fetch(self, source: str, wanted: Wanted) -> None:
        """Try this machine, then other nodes, then the origin."""
        if await wanted.is_here():
            return
        if not source.startswith(LOCAL):
            await self._fetch_from_afar(source, wanted)
            return
        try:
            await wanted.copy(self._sources.local_file(source, wanted.file.path))
        except ArtifactError:
            # Other nodes may have found what this machine lacks.
            if not await self._peers_give(wanted):
                raise

    async def _fetch_from_afar(self, source: str, wanted: Wanted) -> None:
        """Ask other nodes, then the origin; where that breaks off, begin with the nodes anew."""
        cut = ""
        for _ in range(ATTEMPTS_MAX):
            if await self._peers_give(wanted):
                return
            is_resumed = wanted.held_bytes() > 0
            try:
                problem = await self._sources.fetch(source, wanted)
            except Cut as error:
                cut = str(error)
                log.info("fetch cut", extra={"fields": {"file": wanted.file.path, "reason": cut}})
                continue
            if not problem:
                return
            # What an earlier life or a peer left may be spoilt: then once more, from nothing.
            if not is_resumed:
                raise ArtifactError(problem)
        raise ArtifactError(
            f"cannot fetch {wanted.file.path} from {source}: {cut} ({ATTEMPTS_MAX} attempts)"
        )

    async def _peers_give(self, wanted: Wanted) -> bool:
        return self._peers is not None and await self._peers.fetch(wanted)

    def _make_room(self, artifact: Artifact, pinned: Collection[str]) -> None:
        drop = evict(
            self._kept(),
            {*pinned, artifact.digest},
            budget_bytes=self._budget_left_bytes(),
            needed_bytes=artifact.size_bytes,
        )
        if drop is None:
            raise ArtifactError(
                f"cannot fetch {artifact.source}: {artifact.size_bytes} bytes do not fit in the "
                f"disk budget of {self._budget_bytes} beside the artifacts in use and on their way"
            )
        for digest in drop:
            log.info("artifact dropped", extra={"fields": {"digest": digest}})
            # Dropped by one rename, as it came: half of it must never be taken for the whole.
            partial = (self._folder / digest).rename(self._folder / f"{digest}.partial")
            shutil.rmtree(partial)
        free = self._free_bytes()
        # What an earlier fetch left is gone on from.
        needed = artifact.size_bytes - _size_of(self._folder / f"{artifact.digest}.partial")
        if free < needed:
            self._drop_left_partials(artifact.digest)
            free = self._free_bytes()
        if free < needed:
            raise ArtifactError(
                f"cannot fetch {artifact.source}: {needed} bytes needed, the disk has {free} free"
            )

    def _free_bytes(self) -> int:
        """Return what is free on the disk and stays so once all that is on its way has come."""
        coming = sum(one.size_bytes - one.fetched_bytes for one in tuple(self._coming.values()))
        return shutil.disk_usage(self._folder).free - coming

    def _budget_left_bytes(self) -> int:
        """Return the budget of what is whole, beside what is on its way."""
        return self._budget_bytes - sum(one.size_bytes for one in tuple(self._coming.values()))

    def _drop_left_partials(self, wanted: str) -> None:
        """Remove what earlier fetches left that nobody goes on with now."""
        for folder in self._folder.glob("*.partial"):
            if folder.stem != wanted and folder.stem not in self._coming:
                log.info("partial artifact dropped", extra={"fields": {"digest": folder.stem}})
                shutil.rmtree(folder)

    def _kept(self) -> list[Kept]:
        return [
            Kept(digest=folder.name, size_bytes=_size_of(folder), used_at=folder.stat().st_mtime)
            for folder in self._folder.iterdir()
            if _is_digest(folder.name)
        ]


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_digest(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


def _publish(partial: Path, target: Path) -> None:
    """Show an artifact once all of it would outlive a power cut: nobody verifies it again."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.rename(target)
    os.utime(target, (time.time(), time.time()))
    sync(target.parent)
