"""Fetching artifacts from folders and from an HTTP origin with faults."""

import asyncio
import errno
import fcntl
import hashlib
import os
import pickle
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile
from nodeagent.decide.bandwidth import MinimumRate
from nodeagent.decide.eviction import evict
from nodeagent.host.artifacts import artifact_store as artifacts
from nodeagent.host.artifacts import download, tiers
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError, FileDownload
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from tests.ports import free_port

BODY = bytes(range(256)) * 4096
MINIMUM_RATE = MinimumRate(bytes_per_s=100_000.0, window_s=0.2)


def artifact_of(source: str, files: dict[str, bytes]) -> Artifact:
    listed = tuple(
        ArtifactFile(path=path, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        for path, body in files.items()
    )
    return Artifact(source=source, files=listed, digest=manifest_digest(listed))


class Origin:
    """An HTTP origin with faults on request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut_after: list[int] = []
        self.trickles_after: list[int] = []
        self.on_trickle: Callable[[], None] = lambda: None
        self.redirect_to = ""
        self.ranges: list[str] = []

    async def get(self, request: web.Request) -> web.StreamResponse:
        if self.redirect_to:
            return web.Response(status=302, headers={"location": self.redirect_to})
        body = self.files.get(request.path)
        if body is None:
            raise web.HTTPNotFound
        start = 0
        if "range" in request.headers:
            self.ranges.append(request.headers["range"])
            start = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(body) - start
        await response.prepare(request)
        if self.cut_after:
            await response.write(body[start : start + self.cut_after.pop(0)])
            assert request.transport is not None
            request.transport.abort()
            return response
        if self.trickles_after:
            await self._trickle(response, body[start:], self.trickles_after.pop(0))
        else:
            await response.write(body[start:])
        return response

    async def _trickle(self, response: web.StreamResponse, body: bytes, after: int) -> None:
        await response.write(body[:after])
        self.on_trickle()
        with suppress(ConnectionError):
            for byte in body[after:]:
                await response.write(bytes((byte,)))
                await asyncio.sleep(0.02)


@pytest.fixture
async def origin() -> AsyncIterator[tuple[Origin, str]]:
    served = Origin()
    app = web.Application()
    app.router.add_get("/{path:.*}", served.get)
    async with serve_http(app, "127.0.0.1", 0) as port:
        yield served, f"http://127.0.0.1:{port}"


def a_store(
    tmp_path: Path,
    budget: int = 1 << 30,
    *,
    private: bool = True,
    hf: str = "",
    hf_token: str = "",
) -> ArtifactStore:
    sources = ArtifactSources(
        private=private, hf_url=hf, hf_token=hf_token, minimum_rate=MINIMUM_RATE
    )
    link = TransferLink(0, time.monotonic)
    return ArtifactStore(tmp_path / "artifacts", sources, budget, link=link)


async def fetched(store: ArtifactStore, artifact: Artifact, pinned: tuple[str, ...] = ()) -> Path:
    sizes: list[int] = []
    path = await store.ensure(artifact, lambda: pinned, sizes.append)
    assert sizes[-1] == artifact.size_bytes
    assert sizes == sorted(sizes)
    return path


def a_folder(tmp_path: Path, **files: bytes) -> str:
    folder = tmp_path / "source"
    folder.mkdir(exist_ok=True)
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return f"file:{folder}"


async def test_a_folder_is_copied_and_named_by_its_digest(tmp_path: Path) -> None:
    source = a_folder(tmp_path, a=b"aaa", b=b"bb")
    artifact = artifact_of(source, {"a": b"aaa", "b": b"bb"})
    store = a_store(tmp_path)
    path = await fetched(store, artifact)
    assert path.name == artifact.digest
    assert (path / "b").read_bytes() == b"bb"
    assert store.digests() == (artifact.digest,)
    assert await fetched(store, artifact) == path
    with (tmp_path / "source" / "b").open("r+b") as written_into:
        written_into.write(b"??")
    assert (path / "b").read_bytes() == b"bb", "a verified file does not change with its source"


async def test_an_installed_package_is_a_source(tmp_path: Path) -> None:
    from importlib import metadata

    version = metadata.version("click")
    body = Path(str(metadata.distribution("click").locate_file("click/__init__.py"))).read_bytes()
    artifact = artifact_of(f"pypi:click=={version}/click/", {"__init__.py": body})
    await fetched(a_store(tmp_path), artifact)
    wrong = artifact_of("pypi:click==0.0.1/click/", {"__init__.py": body})
    with pytest.raises(ArtifactError, match="is installed"):
        await fetched(a_store(tmp_path / "b"), wrong)
    with pytest.raises(ArtifactError, match="is not installed here"):
        await fetched(a_store(tmp_path / "c"), artifact_of("pypi:no-such/x", {"a": b"a"}))


async def test_a_fetch_cut_in_the_middle_is_resumed(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/models/w.safetensors"] = BODY
    served.cut_after = [300_000, 200_000]
    artifact = artifact_of(f"{url}/models", {"w.safetensors": BODY})
    path = await fetched(a_store(tmp_path), artifact)
    assert (path / "w.safetensors").read_bytes() == BODY
    assert len(served.ranges) == 2
    assert all(int(r.removeprefix("bytes=").rstrip("-")) > 0 for r in served.ranges)


async def test_a_slow_origin_is_cut_and_resumed_at_the_same_byte(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/models/w.safetensors"] = BODY
    artifact = artifact_of(f"{url}/models", {"w.safetensors": BODY})
    served.trickles_after = [300_000] + [0] * 4
    with pytest.raises(ArtifactError, match=r"slower than 100000 bytes/s \(5 attempts\)"):
        await fetched(a_store(tmp_path), artifact)
    served.trickles_after = [0]
    path = await fetched(a_store(tmp_path), artifact)
    assert (path / "w.safetensors").read_bytes() == BODY
    starts = [int(r.removeprefix("bytes=").rstrip("-")) for r in served.ranges]
    assert starts == sorted(starts) and starts[0] >= 300_000


async def test_a_hub_url_has_repository_and_revision(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/owner/name/resolve/v1/sub/config.json"] = b"{}"
    artifact = artifact_of("hf:owner/name@v1", {"sub/config.json": b"{}"})
    path = await fetched(a_store(tmp_path, hf=url), artifact)
    assert (path / "sub" / "config.json").read_bytes() == b"{}"


async def test_a_file_that_differs_from_its_manifest_is_never_published(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    store = a_store(tmp_path)
    cases = {
        "wrong byte": (BODY[:-1] + b"!", BODY, "its SHA-256 is"),
        "short": (BODY[:1000], BODY, "ended after 1000 of"),
        "long": (BODY + b"more", BODY, "sends more than"),
        "missing": (None, BODY, "answered 404"),
    }
    for name, (sent, expected, message) in cases.items():
        path = f"/{name.replace(' ', '-')}/m.gguf"
        if sent is not None:
            served.files[path] = sent
        artifact = artifact_of(f"{url}{path.rpartition('/')[0]}", {"m.gguf": expected})
        with pytest.raises(ArtifactError, match=message):
            await fetched(store, artifact)
        assert store.digests() == ()
    # The same artifact is accepted from a correct origin afterwards.
    served.files["/good/m.gguf"] = BODY
    await fetched(store, artifact_of(f"{url}/good", {"m.gguf": BODY}))


async def test_a_pickle_is_refused_by_its_content(tmp_path: Path) -> None:
    for index, body in enumerate((pickle.dumps({"a": 1}), b"PK\x03\x04rest-of-a-zip")):
        source = a_folder(tmp_path, **{"m.safetensors": body})
        with pytest.raises(ArtifactError, match="a pickle or an archive"):
            await fetched(
                a_store(tmp_path / str(index)), artifact_of(source, {"m.safetensors": body})
            )


async def test_paths_outside_the_folder_and_links_are_refused(tmp_path: Path) -> None:
    source = a_folder(tmp_path, a=b"a")
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    for path in ("../secret", "/etc/passwd", "a/../../secret", "x\0y"):
        with pytest.raises(ArtifactError, match="cannot accept file"):
            await fetched(a_store(tmp_path), artifact_of(source, {path: b"s"}))
    (tmp_path / "source" / "link").symlink_to(secret)
    with pytest.raises(ArtifactError, match="a symbolic link"):
        await fetched(a_store(tmp_path), artifact_of(source, {"link": b"s"}))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("http://example.com/m", "it is not https"),
        ("https://127.0.0.1/m", "not a public address"),
        ("https://[::1]/m", "not a public address"),
        ("https://[::ffff:127.0.0.1]/m", "not a public address"),
        ("https://169.254.169.254/latest", "not a public address"),
        ("https://10.0.0.1/m", "not a public address"),
        ("https://[64:ff9b::a00:1]/m", "not a public address"),
        ("https://[64:ff9b:1::808:808]/m", "not a public address"),
        ("https://[2002:a9fe:a9fe::1]/m", "not a public address"),
        ("https://localhost/m", "cannot reach|cannot fetch"),
    ],
)
async def test_private_addresses_are_refused(tmp_path: Path, source: str, words: str) -> None:
    store = a_store(tmp_path, private=False)
    with pytest.raises(ArtifactError, match=words):
        await fetched(store, artifact_of(source, {"m.gguf": b"x"}))


async def test_an_origin_that_is_down_is_named_with_the_reason(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ArtifactError, match=f"^cannot reach {url}/m.gguf: Connection refused$"):
        await fetched(a_store(tmp_path), artifact_of(url, {"m.gguf": b"x"}))


async def test_too_many_redirects_are_refused(tmp_path: Path, origin: tuple[Origin, str]) -> None:
    served, url = origin
    served.redirect_to = f"{url}/round/and/round"
    with pytest.raises(ArtifactError, match="more than 5 redirects"):
        await fetched(a_store(tmp_path), artifact_of(url, {"m.gguf": b"x"}))


@pytest.mark.parametrize("address", ["http://[x", "//[::1/m", "http://x:y/"])
async def test_a_redirect_to_an_invalid_url_is_refused(
    tmp_path: Path, origin: tuple[Origin, str], address: str
) -> None:
    served, url = origin
    served.redirect_to = address
    with pytest.raises(ArtifactError, match="redirects to an invalid URL"):
        await fetched(a_store(tmp_path), artifact_of(url, {"m.gguf": b"x"}))


async def test_a_published_artifact_was_synced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    synced_at_rename: list[set[int]] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def record_rename(source: Path, target: Path) -> None:
        synced_at_rename.append(set(synced))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    source = a_folder(tmp_path, a=b"aaa")
    (tmp_path / "source" / "sub").mkdir()
    (tmp_path / "source" / "sub" / "b").write_bytes(b"bb")
    artifact = artifact_of(source, {"a": b"aaa", "sub/b": b"bb"})
    path = await fetched(a_store(tmp_path), artifact)
    assert {each.stat().st_ino for each in (path, *path.rglob("*"))} <= synced_at_rename[0]
    assert path.parent.stat().st_ino in synced


async def test_an_artifact_half_deleted_at_a_crash_does_not_count_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = a_folder(tmp_path, a=b"a" * 60, b=b"b" * 60, c=b"c" * 60)
    old = artifact_of(source, {"a": b"a" * 60, "b": b"b" * 60})
    new = artifact_of(source, {"c": b"c" * 60})
    store = a_store(tmp_path, budget=150)
    await fetched(store, old)

    def dies(folder: Path) -> None:
        next(folder.rglob("a")).unlink()
        raise OSError("killed")

    monkeypatch.setattr(shutil, "rmtree", dies)
    with pytest.raises(ArtifactError, match="killed"):
        await fetched(store, new)
    monkeypatch.undo()
    store = a_store(tmp_path, budget=150)
    assert store.digests() == ()
    path = await fetched(store, old)
    assert (path / "a").read_bytes() == b"a" * 60


async def test_the_least_recently_used_artifact_is_evicted_and_never_a_pinned_one(
    tmp_path: Path,
) -> None:
    store = a_store(tmp_path, budget=250)
    artifacts = []
    for index in range(3):
        body = bytes([index]) * 100
        source = a_folder(tmp_path, **{f"m{index}": body})
        artifacts.append(artifact_of(source, {f"m{index}": body}))
    first, second, third = artifacts
    await fetched(store, first)
    await fetched(store, second)
    await fetched(store, third, pinned=(first.digest,))
    assert set(store.digests()) == {first.digest, third.digest}
    pinned = (first.digest, third.digest)
    with pytest.raises(ArtifactError, match="do not fit the disk budget"):
        await fetched(store, second, pinned=pinned)
    assert set(store.digests()) == set(pinned)
    assert store.disk_free_bytes(pinned) == 50
    assert store.disk_free_bytes((first.digest,)) == 150, "an unpinned artifact can be evicted"


def test_page_cache_residency_is_measured_without_reading(tmp_path: Path) -> None:
    cached, uncached = tmp_path / "cached", tmp_path / "uncached"
    cached.write_bytes(BODY)
    with uncached.open("wb") as opened:
        # A hole in the file, which was never read or written.
        opened.truncate(16 * len(BODY))
    assert tiers.is_in_host_memory([cached])
    assert not tiers.is_in_host_memory([uncached])
    assert not tiers.is_in_host_memory([cached, uncached])
    assert not tiers.is_in_host_memory([uncached]), "the check itself reads nothing"
    mostly_cached = [*([cached] * 3), tmp_path / "part"]
    with mostly_cached[-1].open("wb") as opened:
        opened.truncate(len(BODY))
    assert not tiers.is_in_host_memory(mostly_cached)
    assert tiers.is_in_host_memory(mostly_cached, was=True), "the result does not flap"
    assert tiers.disk_bytes_per_s(cached) == 0, "too small to measure"
    large = tmp_path / "large"
    large.write_bytes(BODY * (tiers.MEASURED_BYTES // len(BODY)))
    assert tiers.disk_bytes_per_s(large) > 0


async def test_an_artifact_on_a_read_only_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = a_store(tmp_path)
    artifact = artifact_of(a_folder(tmp_path, a=b"aaa"), {"a": b"aaa"})
    path = await fetched(store, artifact)

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    assert await fetched(store, artifact) == path


async def test_concurrent_requests_fetch_an_artifact_once(
    tmp_path: Path, origin: tuple[Origin, str]
) -> None:
    served, url = origin
    served.files["/m.gguf"] = BODY
    artifact = artifact_of(url, {"m.gguf": BODY})
    store = a_store(tmp_path)
    paths = await asyncio.gather(*(fetched(store, artifact) for _ in range(5)))
    assert len(set(paths)) == 1


async def test_an_empty_file_is_fetched(tmp_path: Path, origin: tuple[Origin, str]) -> None:
    served, url = origin
    served.files.update({"/m/empty": b"", "/m/full": b"x"})
    artifact = artifact_of(f"{url}/m", {"empty": b"", "full": b"x"})
    path = await fetched(a_store(tmp_path), artifact)
    assert (path / "empty").read_bytes() == b""


def cloned(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = int) -> list[int]:
    """Emulate a file system that clones files, and call `then` after each clone."""
    requests: list[int] = []

    def ioctl(out: Any, request: int, source: int) -> int:
        requests.append(request)
        out.write(os.pread(source, os.fstat(source).st_size, 0))
        then()
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    return requests


async def test_a_folder_is_cloned_if_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = cloned(monkeypatch)
    path = await fetched(a_store(tmp_path), artifact_of(a_folder(tmp_path, a=BODY), {"a": BODY}))
    assert requests == [0x40049409]
    assert (path / "a").read_bytes() == BODY


async def test_the_clone_is_verified_instead_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = a_folder(tmp_path, a=b"bad")
    cloned(monkeypatch, lambda: a_folder(tmp_path, a=b"aaa"))
    store = a_store(tmp_path)
    with pytest.raises(ArtifactError, match="its SHA-256 is"):
        await fetched(store, artifact_of(source, {"a": b"aaa"}))
    assert store.digests() == ()


async def test_a_copied_file_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = a_folder(tmp_path, a=BODY)
    partial = tmp_path / "artifacts"
    opened: list[Path] = []
    path_open = Path.open

    def record_open(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "rb" and path.is_relative_to(partial):
            opened.append(path)
        return path_open(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", record_open)
    await fetched(a_store(tmp_path), artifact_of(source, {"a": BODY}))
    assert opened == []


async def test_a_copy_reports_progress_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopping agent, or a start with priority, does not wait for a long copy."""
    monkeypatch.setattr(download, "READ_BYTES", 1024)
    artifact = artifact_of(a_folder(tmp_path, a=BODY), {"a": BODY})
    has_progress = asyncio.Event()
    store = a_store(tmp_path)
    copying = asyncio.create_task(store.ensure(artifact, tuple, lambda size: has_progress.set()))
    async with asyncio.timeout(30):
        await has_progress.wait()
        copying.cancel()
        await asyncio.wait((copying,))
    assert copying.cancelled()
    copied = (tmp_path / "artifacts" / f"{artifact.digest}.partial" / "a").stat().st_size
    assert 0 < copied < len(BODY)
    await fetched(store, artifact)


async def test_two_concurrent_fetches_make_space_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {"old": b"o" * 100, "one": b"1" * 60, "two": b"2" * 70}
    source = a_folder(tmp_path, **bodies)
    old, one, two = (artifact_of(source, {name: body}) for name, body in bodies.items())
    store = a_store(tmp_path, budget=150)
    await fetched(store, old)
    both = threading.Barrier(2)

    def evict_together(*args: Any, **options: Any) -> Any:
        evicted = evict(*args, **options)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return evicted

    monkeypatch.setattr(artifacts, "evict", evict_together)
    await asyncio.gather(fetched(store, one), fetched(store, two))
    assert set(store.digests()) == {one.digest, two.digest}


@pytest.mark.parametrize("short", ["budget", "disk"])
async def test_the_rest_of_a_running_fetch_counts_as_used_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    bodies = {"one": b"1" * 90, "two": b"2" * 70}
    source = a_folder(tmp_path, **bodies)
    one, two = (artifact_of(source, {name: body}) for name, body in bodies.items())
    store = a_store(tmp_path, budget=150 if short == "budget" else 10**6)
    if short == "disk":
        usage = shutil.disk_usage(tmp_path)._replace(free=150)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    has_started, may_finish = asyncio.Event(), asyncio.Event()
    copy = FileDownload.copy

    async def slow(download: FileDownload, path: Path) -> None:
        has_started.set()
        await may_finish.wait()
        await copy(download, path)

    monkeypatch.setattr(FileDownload, "copy", slow)
    first = asyncio.create_task(fetched(store, one))
    await has_started.wait()
    assert store.disk_free_bytes(()) == 60
    with pytest.raises(ArtifactError, match=r"70 (more )?bytes"):
        await fetched(store, two)
    may_finish.set()
    await first
    assert store.digests() == (one.digest,)
