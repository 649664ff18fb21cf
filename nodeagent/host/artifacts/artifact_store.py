"""The artifacts on this node's disk: fetched, verified, and kept within a budget.

Each artifact is a folder named by its digest. The folder appears by one rename, once every file in
it has the size and SHA-256 of the manifest. Incomplete files stay in `DIGEST.partial` and are
resumed later. Files come from this machine if the source is local, else from other nodes, else from
the origin.
"""

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isochrone.service.files import sync
from isochrone.service.threads import run_to_completion
from isochrone.service.trust.model_signature import NO_SIGNERS, ModelSigners
from isochrone.wire.models.artifact import SCHEMES, check_artifact, check_path
from isochrone.wire.models.model import Artifact
from isochrone.wire.peers.adapter import ADAPTER_FILES, CLUSTER_SCHEME
from isochrone.wire.peers.assignment import PeerSource
from nodeagent.decide.eviction import CachedArtifact, evict
from nodeagent.host.artifacts.download import ArtifactError, FileDownload, TransferCut
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.peers import PeerFetcher
from nodeagent.host.artifacts.sources import LOCAL_SCHEMES, ArtifactSources

log = logging.getLogger(__name__)

ATTEMPTS_MAX: Final = 5
"""Attempts at a file whose origin breaks off."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")

OnProgress = Callable[[int], None]


@dataclass(slots=True)
class _FetchInProgress:
    """The size of an artifact that is being fetched, and how much of it is here."""

    size_bytes: int
    fetched_bytes: int = 0

    @property
    def missing_bytes(self) -> int:
        return self.size_bytes - self.fetched_bytes


class ArtifactStore:
    """The artifacts below `folder`. An artifact is fetched once at a time; later callers wait."""

    def __init__(
        self,
        folder: Path,
        sources: ArtifactSources,
        budget_bytes: int,
        *,
        link: TransferLink,
        peers: PeerFetcher | None = None,
        signers: ModelSigners = NO_SIGNERS,
    ) -> None:
        """Fetch over `link`, from `peers` before the origin.

        If there are `signers`, one of them must have signed each model.
        """
        self._folder = folder
        self._sources = sources
        self._budget_bytes = budget_bytes
        self._peers = peers
        self._signers = signers
        self.link = link
        self._fetch_locks: dict[str, asyncio.Lock] = {}
        self._space_lock = asyncio.Lock()
        self._fetches: dict[str, _FetchInProgress] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def digests(self) -> tuple[str, ...]:
        """Return the digests of the complete artifacts."""
        return tuple(sorted(p.name for p in self._folder.iterdir() if _is_digest(p.name)))

    def file_of(self, digest: str, path: str) -> Path | None:
        """Return a file of a complete artifact, or None if this node does not have it."""
        if not _is_digest(digest) or check_path(path):
            return None
        file = self._folder / digest / path
        return file if file.is_file() and not file.is_symlink() else None

    def fetched_bytes(self, digest: str) -> int | None:
        """Return how much of an artifact has been fetched, or None if no fetch is in progress."""
        fetch = self._fetches.get(digest)
        return fetch.fetched_bytes if fetch else None

    def files_of(self, digest: str) -> list[Path]:
        """Return all files of a complete artifact."""
        return sorted(p for p in (self._folder / digest).rglob("*") if p.is_file())

    def disk_free_bytes(self, pinned: Collection[str]) -> int:
        """Return the bytes that a new artifact could take if all but the `pinned` were deleted."""
        cached = self._cached()
        used_bytes = sum(artifact.size_bytes for artifact in cached)
        evictable_bytes = sum(a.size_bytes for a in cached if a.digest not in pinned)
        on_disk = self._free_bytes() + evictable_bytes
        in_budget = self._budget_left_bytes() - used_bytes + evictable_bytes
        return max(0, min(on_disk, in_budget))

    async def ensure(
        self,
        artifact: Artifact,
        pinned: Callable[[], Collection[str]],
        on_progress: OnProgress,
        *,
        bytes_per_s: float = 0.0,
        holders: Sequence[PeerSource] = (),
        is_adapter: bool = False,
        fetch_slots: asyncio.Semaphore | None = None,
    ) -> Path:
        """Return the folder of an artifact, fetching it if it is missing. Raises ArtifactError.

        The digests that `pinned` returns, once it is this fetch's turn, are not deleted to make
        space. `on_progress` gets the bytes so far.
        `bytes_per_s` limits this fetch below the link's own rate; 0 is no further limit. `holders`
        are nodes to fetch from beside those that the assignment names. An adapter needs no
        signature: only an engine's request for one loads it, under a name of its own. A fetch waits
        for one of the `fetch_slots`; an artifact that is here, or is being fetched, does not.
        """
        problem = check_artifact(artifact, (*SCHEMES, CLUSTER_SCHEME))
        problem = problem or ("" if is_adapter else self._signers.problem(artifact))
        if problem:
            raise ArtifactError(problem)
        target = self._folder / artifact.digest
        async with self._fetch_locks.setdefault(artifact.digest, asyncio.Lock()):
            if await asyncio.to_thread(_note_use, target):
                on_progress(artifact.size_bytes)
                return target
            if self._peers is not None:
                self._peers.name_holders(artifact.digest, holders)
            link = self.link.limited_to(bytes_per_s)
            async with fetch_slots or nullcontext():
                await self._fetch(artifact, target, pinned, on_progress, link)
        return target

    async def _fetch(
        self,
        artifact: Artifact,
        target: Path,
        pinned: Callable[[], Collection[str]],
        on_progress: OnProgress,
        link: TransferLink,
    ) -> None:
        """Make space for a missing artifact, and fetch it. Raises ArtifactError."""
        try:
            async with self._space_lock:
                await run_to_completion(self._make_space, artifact, pinned())
                self._fetches[artifact.digest] = _FetchInProgress(artifact.size_bytes)
            await self._fetch_files(artifact, target, on_progress, link)
        except OSError as error:
            raise ArtifactError(
                f"cannot store {artifact.source}: {error.strerror or error}"
            ) from error
        finally:
            self._fetches.pop(artifact.digest, None)

    async def delete_idle_adapters(self, kept: Collection[str], used_before: float) -> int:
        """Delete LoRA adapters that were last used before then (Unix time); return how many.

        `kept` are digests that must stay.
        """
        deleted = 0
        for digest in await asyncio.to_thread(self._idle_adapters, used_before):
            if digest not in kept:
                async with (
                    self._fetch_locks.setdefault(digest, asyncio.Lock()),
                    self._space_lock,
                ):
                    deleted += await run_to_completion(self._delete_if_idle, digest, used_before)
        return deleted

    def _idle_adapters(self, used_before: float) -> list[str]:
        return [
            artifact.digest
            for artifact in self._cached()
            if artifact.used_at < used_before
            and {path.name for path in (self._folder / artifact.digest).iterdir()}
            == set(ADAPTER_FILES)
        ]

    def _delete_if_idle(self, digest: str, used_before: float) -> bool:
        """Delete an artifact unless it was used since it was found idle, or has been evicted."""
        folder = self._folder / digest
        if not folder.exists() or folder.stat().st_mtime >= used_before:
            return False
        self._delete(digest)
        return True

    async def _fetch_files(
        self, artifact: Artifact, target: Path, on_progress: OnProgress, link: TransferLink
    ) -> None:
        """Fetch every file of an artifact, then publish its folder."""
        partial = self._folder / f"{artifact.digest}.partial"
        done_bytes = 0

        def on_file_progress(size_bytes: int) -> None:
            self._fetches[artifact.digest].fetched_bytes = done_bytes + size_bytes
            on_progress(done_bytes + size_bytes)

        for file in artifact.files:
            path = partial / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            download = FileDownload(artifact.digest, file, path, on_file_progress, link)
            await self._fetch_file(artifact.source, download)
            on_file_progress(file.size_bytes)
            done_bytes += file.size_bytes
        await run_to_completion(_publish, partial, target)

    async def _fetch_file(self, source: str, download: FileDownload) -> None:
        """Fetch one file: from this machine, else from other nodes, else from the origin."""
        if await download.is_complete():
            return
        if not source.startswith(LOCAL_SCHEMES):
            await self._fetch_remote_file(source, download)
            return
        try:
            await download.copy(self._sources.local_file(source, download.file.path))
        except ArtifactError:
            # Another node may have a file that is missing on this machine.
            if not await self._fetch_from_peers(download):
                raise

    async def _fetch_remote_file(self, source: str, download: FileDownload) -> None:
        """Fetch one file from other nodes, else from the origin; start over when it breaks off."""
        last_cut = ""
        for _ in range(ATTEMPTS_MAX):
            if await self._fetch_from_peers(download):
                return
            is_resumed = download.partial_bytes() > 0
            try:
                problem = await self._sources.fetch(source, download)
            except TransferCut as error:
                last_cut = str(error)
                fields = {"file": download.file.path, "reason": last_cut}
                log.info("transfer cut", extra={"fields": fields})
                continue
            if not problem:
                return
            # Bytes from an earlier run or another node may be corrupt: try once more from byte 0.
            if not is_resumed:
                raise ArtifactError(problem)
        raise ArtifactError(
            f"cannot fetch {download.file.path} from {source}: {last_cut} ({ATTEMPTS_MAX} attempts)"
        )

    async def _fetch_from_peers(self, download: FileDownload) -> bool:
        return self._peers is not None and await self._peers.fetch(download)

    def _make_space(self, artifact: Artifact, pinned: Collection[str]) -> None:
        """Delete artifacts until this one fits budget and disk. Raises ArtifactError."""
        evicted = evict(
            self._cached(),
            {*pinned, artifact.digest},
            budget_bytes=self._budget_left_bytes(),
            needed_bytes=artifact.size_bytes,
        )
        if evicted is None:
            raise ArtifactError(
                f"cannot fetch {artifact.source}: {artifact.size_bytes} bytes do not fit the disk "
                f"budget of {self._budget_bytes} beside the artifacts in use or being fetched"
            )
        for digest in evicted:
            self._delete(digest)
        free_bytes = self._free_bytes()
        # The fetch resumes from what an earlier one left.
        needed = artifact.size_bytes - _size_of(self._folder / f"{artifact.digest}.partial")
        if free_bytes < needed:
            self._delete_partials(artifact.digest)
            free_bytes = self._free_bytes()
        if free_bytes < needed:
            raise ArtifactError(
                f"cannot fetch {artifact.source}: it needs {needed} more bytes and the disk has "
                f"{free_bytes} free"
            )

    def _delete(self, digest: str) -> None:
        """Delete a complete artifact."""
        log.info("artifact deleted", extra={"fields": {"digest": digest}})
        # Renamed first: a half-deleted folder must never count as a complete artifact.
        partial = (self._folder / digest).rename(self._folder / f"{digest}.partial")
        shutil.rmtree(partial)

    def _free_bytes(self) -> int:
        """Return the free disk space that remains when all current fetches are complete."""
        missing = sum(fetch.missing_bytes for fetch in tuple(self._fetches.values()))
        return shutil.disk_usage(self._folder).free - missing

    def _budget_left_bytes(self) -> int:
        """Return the budget for complete artifacts: the total less all current fetches."""
        return self._budget_bytes - sum(f.size_bytes for f in tuple(self._fetches.values()))

    def _delete_partials(self, kept_digest: str) -> None:
        """Delete the remains of earlier fetches that no current fetch resumes."""
        for folder in self._folder.glob("*.partial"):
            if folder.stem != kept_digest and folder.stem not in self._fetches:
                log.info("partial artifact deleted", extra={"fields": {"digest": folder.stem}})
                shutil.rmtree(folder)

    def _cached(self) -> list[CachedArtifact]:
        return [
            CachedArtifact(
                digest=folder.name, size_bytes=_size_of(folder), used_at=folder.stat().st_mtime
            )
            for folder in self._folder.iterdir()
            if _is_digest(folder.name)
        ]


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _note_use(folder: Path) -> bool:
    """Note that an artifact is used now; return whether it is here."""
    try:
        os.utime(folder)
    except FileNotFoundError:
        return False
    except OSError:
        # On a read-only disk the use is not noted, and the artifact can be used all the same.
        return True
    return True


def _is_digest(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


def _publish(partial: Path, target: Path) -> None:
    """Rename a complete artifact to its digest, after syncing it to disk.

    A published artifact is not verified again, so it must survive a power failure whole.
    """
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.rename(target)
    os.utime(target, (time.time(), time.time()))
    sync(target.parent)
