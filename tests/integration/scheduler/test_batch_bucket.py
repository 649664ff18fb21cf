"""Files of batches in a folder, and in a bucket of a real S3 server, with and without ranges."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Final

import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.state.files import batch_bucket
from scheduler.state.files.batch_bucket import PART_BYTES, BatchBucket
from scheduler.state.files.batch_folder import BatchFolder
from tests.integration.scheduler.s3_server import Server, server
from tests.ports import free_port

__all__ = ["server"]

FILE_BYTES: Final = 112 * 1024 * 1024
MEMORY_BYTES_MAX: Final = 64 * 1024 * 1024
"""What a process may need more while it writes and reads a file of FILE_BYTES: PART_BYTES for each
part that is being sent, and what allocators keep."""

USE_FILE: Final = """
import json, sys
from pathlib import Path
from scheduler.state.files.batch_bucket import BatchBucket
endpoint, spool, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
store = BatchBucket("s3://bucket/below", spool, endpoint=endpoint, region="")
store.prepare()
def peak_bytes():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
before = peak_bytes()
block = b"x" * 1048575 + b"\\n"
with store.writing("large") as output:
    for _ in range(size // len(block)):
        output.write(block)
with store.open("large") as source:
    lines = sum(1 for line in source if line == block)
last = store._read_parts("large", [(size - 2, 2)])
print(json.dumps({"lines": lines, "last": last[0].decode(), "needed": peak_bytes() - before}))
"""


def a_bucket(server: Server, url: str = "", place: str = "s3://bucket/below") -> BatchBucket:
    return BatchBucket(place, server.spool, endpoint=url or server.url, region="")


async def test_files_of_a_folder(tmp_path: Path) -> None:
    await files_are_written_read_and_deleted(BatchFolder(tmp_path / "files"))


async def test_files_of_a_bucket(server: Server) -> None:
    with_ranges = a_bucket(server, server.proxy.url)
    await files_are_written_read_and_deleted(with_ranges)
    assert with_ranges.has_ranges
    assert server.proxy.ranges > 4
    without = a_bucket(server)
    await files_are_written_read_and_deleted(without)
    assert not without.has_ranges
    parts = await a_bucket_with_a_file(server)
    assert await parts.read_parts("file-3", [(2, 2), (0, 1), (2, 2)]) == [b"cd", b"a", b"cd"]


async def a_bucket_with_a_file(server: Server) -> BatchBucket:
    """Return a new object of a server without ranges, which has not noticed that."""
    store = a_bucket(server)

    def write() -> None:
        with store.writing("file-3") as output:
            output.write(b"abcdef")

    await asyncio.to_thread(write)
    return store


async def files_are_written_read_and_deleted(store: BatchFolder) -> None:
    await asyncio.to_thread(store.prepare)
    line = b"x" * 1023 + b"\n"
    count = 2 * PART_BYTES // len(line) + 5  # three parts of an upload

    def write() -> None:
        with store.writing("file-1") as output:
            for _ in range(count):
                output.write(line)
        with store.writing("empty"):
            pass

    def read() -> int:
        with store.open("empty") as source:
            assert source.read() == b""
        with store.open("file-1") as source:
            assert source.readline() == line
            source.seek(len(line) * (count - 2) + 1)
            assert source.read(5) == b"xxxxx"
            source.seek(0)
            return sum(1 for found in source if found == line)

    def fail() -> None:
        with store.writing("file-2") as output:
            output.write(b"half")
            raise ZeroDivisionError

    def read_twice() -> None:
        with store.local("file-1") as local:
            assert local.read(len(line)) == line
            local.seek(0)
            assert sum(1 for found in local if found == line) == count

    await asyncio.to_thread(write)
    assert await asyncio.to_thread(read) == count
    await asyncio.to_thread(read_twice)
    assert await store.read_parts("file-1", [(1020, 6), (0, 2)]) == [b"xxx\nxx", b"xx"]
    await store.delete("file-1")
    await store.delete("file-1")
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(store.open, "file-1")
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(fail)
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(store.open, "file-2")


@pytest.mark.parametrize("has_ranges", [True, False])
async def test_a_file_is_never_in_memory(server: Server, has_ranges: bool) -> None:
    process = await use_file(server, server.proxy.url if has_ranges else server.url, FILE_BYTES)
    output, _ = await process.communicate()
    found = json.loads(output)
    assert found["lines"] == FILE_BYTES // 1048576
    assert found["last"] == "x\n"
    assert found["needed"] < MEMORY_BYTES_MAX


async def test_a_process_killed_amid_an_upload_leaves_no_file(server: Server) -> None:
    server.proxy.holds_parts = True
    process = await use_file(server, server.proxy.url, 3 * PART_BYTES)
    async with asyncio.timeout(120):
        await server.proxy.part_came.wait()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert list(server.spool.iterdir()) == []
    store = a_bucket(server)
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(store.open, "large")


async def use_file(server: Server, url: str, size: int) -> asyncio.subprocess.Process:
    arguments = (url, str(server.spool), str(size))
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", USE_FILE, *arguments, stdout=asyncio.subprocess.PIPE
    )


async def test_what_is_wrong_with_a_bucket_is_said(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(OSError, match="there is no such bucket, create it"):
        await asyncio.to_thread(a_bucket(server, place="s3://missing").prepare)
    elsewhere = BatchBucket("s3://bucket", tmp_path / "x", endpoint=server.url, region="")
    with pytest.raises(OSError, match="cannot write to batch_spool_folder "):
        await asyncio.to_thread(elsewhere.prepare)

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    denied = a_bucket(server)
    with pytest.raises(OSError, match="the store refuses the credentials"):
        await asyncio.to_thread(denied.prepare)
    with pytest.raises(ApiError, match="the store refuses the credentials"):
        await denied.delete("file-1")

    # At the start of a scheduler that is no reason to stop.
    absent = a_bucket(server, f"http://127.0.0.1:{free_port()}")
    await asyncio.to_thread(absent.prepare)
    assert "cannot reach the bucket" in caplog.text


async def test_a_bucket_that_stops_answering_gives_503(server: Server) -> None:
    store = await a_bucket_with_a_file(server)
    server.process.kill()
    server.process.wait()
    with pytest.raises(ApiError, match="cannot use the bucket s3://bucket/below") as raised:
        await asyncio.to_thread(store.open, "file-3")
    assert raised.value.code == ErrorCode.UNAVAILABLE
    with pytest.raises(ApiError, match="cannot use the bucket"):
        await a_bucket_with_a_file(server)
    await store.discard("file-3")  # logs, and does not hide an earlier error


async def test_a_bucket_that_sends_or_takes_a_byte_a_second_gives_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="pip install 'isochrone[s3]'")
    monkeypatch.setattr(batch_bucket, "REQUEST_TIMEOUT_S", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    described = {"etag": '"a"', "last-modified": "Sun, 29 Nov 2026 10:00:00 GMT"}

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**described, "content-length": "100000"})
        if request.method == "HEAD":
            return response
        if request.method == "PUT":
            await asyncio.Event().wait()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(1.0)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", drip)
    async with serve_http(app, "127.0.0.1", 0) as port, asyncio.timeout(60):
        place = f"http://127.0.0.1:{port}"
        store = BatchBucket("s3://bucket", tmp_path, endpoint=place, region="")

        def read() -> None:
            with store.open("f") as source:
                source.read()

        def write() -> None:
            with store.writing("g") as output:
                output.write(b"x")

        for call in (read, write, lambda: list(store.stream("f"))):
            with pytest.raises(ApiError) as raised:
                await store.run(call)
            assert raised.value.code is ErrorCode.UNAVAILABLE


def test_a_url_of_no_bucket_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="pip install 'isochrone[s3]'")
    with pytest.raises(OSError, match="s3://bucket/prefix"):
        BatchBucket("https://example.net/b", tmp_path, endpoint="", region="")


async def test_schedulers_that_start_together_do_not_refuse_the_bucket(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deletes what the other one has written to see whether it may."""
    first, second = a_bucket(server), a_bucket(server)
    put = first._obstore.put

    def put_before_the_other_ends(*arguments: object, **named: object) -> object:
        monkeypatch.setattr(first._obstore, "put", put)
        done = put(*arguments, **named)
        second.prepare()
        return done

    monkeypatch.setattr(first._obstore, "put", put_before_the_other_ends)
    await asyncio.to_thread(first.prepare)
