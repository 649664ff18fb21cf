"""The HTTP server over real sockets: slow, huge or malformed requests get an error in time."""

import asyncio
import gzip
import io
import json
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from isochrone.service.config import ConfigError
from isochrone.service.network.http_server import (
    HttpServerLimits,
    error_middleware,
    json_error,
    read_body,
    serve_http,
    serve_http_unix,
)
from isochrone.wire.errors import ApiError, ErrorCode

LIMITS = HttpServerLimits(head_timeout_s=2.0, keepalive_s=0.5, connections_per_address_max=20)


class PanicException(BaseException):
    """As pyo3 raises it."""

    __module__ = "pyo3_runtime"


def an_app() -> web.Application:
    async def size(request: web.Request) -> web.Response:
        body = await read_body(request, bytes_max=100_000, timeout_s=0.5)
        return web.Response(text=str(len(body)))

    async def broken(request: web.Request) -> web.Response:
        raise KeyError("secret detail")

    async def refused(request: web.Request) -> web.Response:
        raise ApiError(ErrorCode.RATE_LIMITED, "cannot serve: too many", retry_after_s=7)

    async def left(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if request.query_string == "begun":
            await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        # The transport is closing already, and the handler is not cancelled yet.
        await response.prepare(request)
        await response.write(b"too late")
        return response

    async def panics(request: web.Request) -> web.Response:
        def call() -> web.Response:
            raise PanicException("index out of bounds")

        return await asyncio.to_thread(call) if request.query_string else call()

    app = web.Application(middlewares=[error_middleware(json_error)])
    app.router.add_post("/size", size)
    app.router.add_get("/panics", panics)
    app.router.add_get("/left", left)
    app.router.add_get("/broken", broken)
    app.router.add_get("/refused", refused)
    return app


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serve_http(an_app(), "127.0.0.1", 0, limits=LIMITS) as bound:
        yield bound


async def answer(port: int, sent: bytes) -> bytes:
    """Send raw bytes and return everything until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    return received


async def until_answered(port: int, sent: bytes) -> bytes:
    """Send a request again until it is answered: idle connections are looked for now and then."""
    async with asyncio.timeout(30):
        while True:
            with suppress(ConnectionError):
                if received := await answer(port, sent):
                    return received


@pytest.mark.parametrize("begun", ["begun", ""])
async def test_a_client_that_leaves_is_not_logged_as_an_error(
    port: int, caplog: pytest.LogCaptureFixture, begun: str
) -> None:
    with suppress(ConnectionError):
        await answer(port, f"GET /left?{begun} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert await answer(port, b"GET /refused HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("place", ["thread", ""])
async def test_a_panic_of_a_library_in_rust_is_answered_as_an_internal_error(
    port: int, place: str
) -> None:
    """It is no `Exception`: the client would get no answer."""
    head = f"GET /panics?{place} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    received = await answer(port, head.encode())
    assert received.startswith(b"HTTP/1.1 500 ")
    assert b"an internal error was logged" in received
    assert b"index out of bounds" not in received


HEAD = b"POST /size HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"X-slow: ", b"POST"],
    ids=["idle", "half-head", "half-field", "half-line"],
)
async def test_a_connection_with_an_unfinished_head_is_closed(port: int, sent: bytes) -> None:
    assert await answer(port, sent) == b""


async def test_a_connection_with_an_unfinished_second_head_is_closed() -> None:
    limits = msgspec.structs.replace(LIMITS, head_timeout_s=0.2, keepalive_s=3600.0)
    async with serve_http(an_app(), "127.0.0.1", 0, limits=limits) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = HEAD + b"Content-Length: 2\r\n\r\n{}"
        async with asyncio.timeout(30):
            # A head that is complete in time cancels the timer that its first bytes started.
            for part in (request, request[:20], request[20:]):
                writer.write(part)
                if part != request[:20]:
                    assert (await reader.readuntil(b"\r\n\r\n2")).startswith(b"HTTP/1.1 200 ")
            writer.write(HEAD + b"X-slow: ")
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("has_sent", [True, False], ids=["after-an-answer", "silent"])
async def test_idle_connections_of_strangers_keep_nobody_out(has_sent: bool) -> None:
    """20,000 of them, from four addresses, kept all others from a scheduler and from a router."""
    limits = HttpServerLimits(head_timeout_s=3600.0, keepalive_s=3600.0, connections_max=16)
    request = HEAD + b"Content-Length: 2\r\n\r\n{}"
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve_http(an_app(), "127.0.0.1", 0, limits=limits))
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            if has_sent:
                with suppress(ConnectionError):
                    writer.write(request)
                    await reader.read(1)
        last = HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
        assert (await until_answered(port, last)).startswith(b"HTTP/1.1 200 ")


FIELD = b"X: " + b"a" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + 80 * FIELD,
        HEAD + b"Content-Length: 2\r\n\r\n{}" + HEAD + 80 * FIELD,
        HEAD + b"Content-Length: 0\r\n\r\n" + HEAD + 80 * FIELD,
    ],
    ids=["first", "after-a-body", "second"],
)
async def test_no_more_of_an_unfinished_head_is_kept_than_the_limit(sent: bytes) -> None:
    """500 strangers with heads of a megabyte took 940 MiB of the scheduler's memory."""
    limits = msgspec.structs.replace(LIMITS, head_timeout_s=3600.0, keepalive_s=3600.0)
    async with serve_http(an_app(), "127.0.0.1", 0, limits=limits) as port:
        with suppress(ConnectionError):
            assert b"HTTP/1.1 400 " not in await answer(port, sent)


async def test_a_head_above_the_limit_gets_400(port: int) -> None:
    received = await answer(port, HEAD + 33 * FIELD + b"Content-Length: 2\r\n\r\n{}")
    assert received.split(b" ", 2)[1] == b"400"
    assert b"the head has more than 32768 bytes" in received


SMALL, FULL_OF_FIELDS = b"", b"a:b\r\n" * 120


@pytest.mark.parametrize(
    ("fields", "body", "count", "answers"),
    [
        (SMALL, b"", 30, 31),
        (30 * FIELD, b"", 1, 2),
        (30 * FIELD, b"", 4, 0),
        (FULL_OF_FIELDS, b"", 4, 0),
        (SMALL, b"x" * 30_000, 1, 2),
        (SMALL, b"x" * 30_000, 4, 0),
    ],
    ids=["small", "a-large-head", "large-heads", "many-fields", "a-body", "bodies"],
)
async def test_requests_that_wait_take_limited_memory(
    port: int, fields: bytes, body: bytes, count: int, answers: int
) -> None:
    """200 strangers that did not read their answers took 4.7 GB of the scheduler's memory."""
    one = HEAD + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    received = b""
    with suppress(ConnectionError):
        received = await answer(port, count * one + last)
    assert received.count(b"HTTP/1.1 ") == answers


async def test_a_body_may_be_larger_than_a_head(port: int) -> None:
    body = b"x" * 90_000
    sent = HEAD + b"Connection: close\r\nContent-Length: 90000\r\n\r\n" + body
    assert (await answer(port, sent)).endswith(b"90000")


async def test_an_unfinished_body_gets_408(port: int) -> None:
    received = await answer(port, HEAD + b"Content-Length: 10\r\n\r\n123")
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in received


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"Content-Length: +5\r\n\r\n12345",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n12",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Bad Header: 1\r\n\r\n",
        HEAD + b"Expect: a-miracle\r\nContent-Length: 1\r\n\r\n1",
        HEAD + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
    ],
    ids=[
        "line",
        "signed-length",
        "both",
        "two-lengths",
        "bad-te",
        "space",
        "expect",
        "20kB",
        "10^4-heads",
    ],
)
async def test_malformed_http_gets_400_in_the_servers_own_form(port: int, sent: bytes) -> None:
    received = await answer(port, sent)
    assert received.split(b" ", 2)[1] == b"400"
    body = json.loads(received.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == "invalid_request"


async def test_a_broken_encoding_is_reported_to_the_client_and_not_logged(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    received = await answer(port, HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"broken encoding" in received
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_gzip_bomb_and_a_huge_body_are_refused_without_using_memory(port: int) -> None:
    bomb = gzip.compress(b"\0" * 300_000_000, compresslevel=1)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    url = f"http://127.0.0.1:{port}/size"

    async def hundred_megabytes() -> AsyncIterator[bytes]:
        for _ in range(1600):
            yield b"x" * 65_536

    async with aiohttp.ClientSession() as http:
        gzipped = {"content-encoding": "gzip"}
        async with http.post(url, data=io.BytesIO(bomb), headers=gzipped) as response:
            assert response.status == 413
        # A connection closed while the client still sends counts as refused too.
        with suppress(aiohttp.ClientOSError):
            async with http.post(url, data=hundred_megabytes()) as response:
                assert response.status == 413
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after_kib - before_kib < 64 * 1024


async def test_errors_have_one_form_and_hide_internal_details(port: int) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        expected = {
            ("GET", "/nowhere"): (404, "not_found"),
            ("GET", "/size"): (405, "method_not_allowed"),
            ("GET", "/broken"): (500, "internal_error"),
            ("GET", "/refused"): (429, "rate_limit_exceeded"),
        }
        for (method, path), (status, code) in expected.items():
            async with http.request(method, path) as response:
                text = await response.text()
                assert response.status == status
                assert json.loads(text)["error"]["code"] == code
                assert "secret detail" not in text
        async with http.get("/size") as response:
            assert response.headers["allow"] == "POST"
            message = (await response.json())["error"]["message"]
            assert message == "cannot use the method GET for /size: use POST"
        async with http.get("/refused") as response:
            assert response.headers["retry-after"] == "7"


async def test_connections_over_the_limit_are_closed_and_the_others_served(port: int) -> None:
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    assert await answer(port, HEAD + b"Content-Length: 0\r\n\r\n") == b""
    reader, writer = held[0]
    writer.write(HEAD + b"Content-Length: 2\r\n\r\nok")
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    for _, each in held:
        each.close()


async def test_an_address_that_cannot_be_listened_on_is_named(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"on 127\.0\.0\.1:{port}: Address already in use"):
        async with serve_http(an_app(), "127.0.0.1", port):
            raise AssertionError("it should not listen")
    with pytest.raises(ConfigError, match=r"cannot listen on nobody\.invalid:1: "):
        async with serve_http(an_app(), "nobody.invalid", 1):
            raise AssertionError("it should not listen")


async def test_a_fleet_may_connect_while_the_server_is_busy() -> None:
    kernel_max = int(Path("/proc/sys/net/core/somaxconn").read_text())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        with ExitStack() as open_sockets:
            async with serve_http(an_app(), "127.0.0.1", 0) as port:
                # The event loop does not run meanwhile: what the kernel does not take times out.
                for _ in range(min(3_000, kernel_max)):
                    peer = open_sockets.enter_context(socket.socket())
                    peer.settimeout(0.9)
                    peer.connect(("127.0.0.1", port))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_unix_socket_is_private_and_no_other_file_is_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A umask holds for the whole process: folders of other threads could not be entered."""
    monkeypatch.setattr(os, "umask", None)
    path = tmp_path / "server.sock"
    for _ in range(2):
        # The second one finds the socket of the first, as after a crash.
        async with serve_http_unix(an_app(), path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.is_socket()
    path.unlink()
    path.write_text("a file of somebody")
    with pytest.raises(ConfigError, match="cannot listen on"):
        async with serve_http_unix(an_app(), path):
            pass
    assert path.read_text()


async def test_hundreds_may_connect_to_a_unix_socket_at_once(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    connector = aiohttp.UnixConnector(str(path), limit=0)
    limits = msgspec.structs.replace(LIMITS, connections_per_address_max=1_000)
    async with (
        serve_http_unix(an_app(), path, limits=limits),
        aiohttp.ClientSession("http://localhost", connector=connector) as http,
    ):

        async def status() -> int:
            async with http.post("/size", data=b"x") as response:
                return response.status

        assert set(await asyncio.gather(*(status() for _ in range(600)))) == {200}
