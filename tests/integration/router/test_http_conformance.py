"""HTTP/1.1 as in RFC 9112, byte by byte: against the router, and against aiohttp for comparison."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from isochrone.service.network.http_server import HttpServerLimits, serve_http
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench

BODY = b'{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hello"}]}'
PATH = b"/v1/chat/completions"
AUTH = b"Host: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"


def a_request(
    extra: bytes = b"", body: bytes = BODY, line: bytes = b"POST " + PATH + b" HTTP/1.1"
) -> bytes:
    """Return a request with a Content-Length."""
    length = b"Content-Length: %d\r\n" % len(body)
    return line + b"\r\n" + AUTH + length + extra + b"\r\n" + body


def chunked(*chunks: bytes, last: bytes = b"0\r\n\r\n", extra: bytes = b"") -> bytes:
    """Return a request with a chunked body."""
    head = b"POST " + PATH + b" HTTP/1.1\r\n" + AUTH + b"Transfer-Encoding: chunked\r\n" + extra
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"\r\n" + body + last


class Target:
    """A server under test, and the node behind it."""

    def __init__(self, port: int, node: FakeNode) -> None:
        self.port = port
        self.node = node

    async def connect(self) -> "Wire":
        """Open a connection."""
        return Wire(*await asyncio.open_connection("127.0.0.1", self.port))

    async def exchange(self, data: bytes) -> bytes:
        """Send bytes; return all that is received until the server closes."""
        wire = await self.connect()
        wire.writer.write(data)
        try:
            return await wire.rest()
        finally:
            wire.writer.close()


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def rest(self) -> bytes:
        """Read to the end."""
        async with asyncio.timeout(30):
            return await self.reader.read()

    async def read_response(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Read one response."""
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status = int(head.split(" ", 2)[1])
            lines = head.split("\r\n")[1:-2]
            fields = {name.lower(): value for name, value in (x.split(": ", 1) for x in lines)}
            body = b""
            if not has_body:
                return status, fields, body
            if "content-length" in fields:
                body = await self.reader.readexactly(int(fields["content-length"]))
            elif fields.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
            return status, fields, body


@asynccontextmanager
async def serve_with_router(folder: Path) -> AsyncIterator[Target]:
    """Serve through the router."""
    async with a_bench(folder, body_bytes_max=100_000) as bench:
        yield Target(bench.app.port, bench.nodes[0])


@asynccontextmanager
async def serve_with_aiohttp(folder: Path) -> AsyncIterator[Target]:
    """Serve the same node's answers with aiohttp."""
    node = FakeNode()

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=100_000)
    app.router.add_post(PATH.decode(), node.generate)
    app.router.add_get("/healthz", health)
    limits = HttpServerLimits(head_timeout_s=0.5, shutdown_timeout_s=0.2)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve_http(app, "127.0.0.1", 0, limits=limits))
        yield Target(port, node)


@pytest.fixture(params=[serve_with_router, serve_with_aiohttp], ids=["router", "aiohttp"])
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Target]:
    async with request.param(tmp_path) as server:
        yield server


def content(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


async def test_one_connection_serves_many_requests(target: Target) -> None:
    wire = await target.connect()
    for count in range(1, 6):
        body = BODY.replace(b":2,", b":%d," % count)
        wire.writer.write(a_request(body=body))
        status, _, answered = await wire.read_response()
        assert (status, content(answered)) == (200, " ".join(f"t{n}" for n in range(count)))
    wire.writer.close()


async def test_pipelined_requests_are_answered_in_order(target: Target) -> None:
    wire = await target.connect()
    wire.writer.write(
        b"".join(a_request(body=BODY.replace(b":2,", b":%d," % n)) for n in range(1, 31))
    )
    for count in range(1, 31):
        status, _, answered = await wire.read_response()
        assert (status, len(content(answered).split())) == (200, count)
    wire.writer.close()


async def test_a_request_split_at_any_byte_is_read_whole(target: Target) -> None:
    sent = a_request()
    for cut in range(1, len(sent), 7):
        wire = await target.connect()
        wire.writer.write(sent[:cut])
        await asyncio.sleep(0)
        await wire.writer.drain()
        wire.writer.write(sent[cut:])
        assert (await wire.read_response())[0] == 200, f"cut at {cut}"
        wire.writer.close()
    assert set(target.node.bodies) == {BODY}


@pytest.mark.parametrize(
    "sent",
    [
        chunked(BODY),
        chunked(*[bytes([byte]) for byte in BODY]),
        chunked(BODY[:9], BODY[9:], last=b"0\r\nX-Trailer: 1\r\n\r\n"),
        chunked(b"", last=b"").removesuffix(b"0\r\n\r\n")
        + b"%x;name=value\r\n" % len(BODY)
        + BODY
        + b"\r\n0;last\r\n\r\n",
        chunked(BODY).replace(b"4e\r\n", b"00004E\r\n"),
    ],
    ids=["one", "bytes", "trailers", "extensions", "zeros"],
)
async def test_chunked_bodies_are_read(target: Target, sent: bytes) -> None:
    wire = await target.connect()
    for _ in range(2):
        wire.writer.write(sent)
        assert (await wire.read_response())[0] == 200
    assert target.node.bodies == [BODY, BODY]
    wire.writer.close()


async def test_a_client_that_expects_100_gets_100(target: Target) -> None:
    wire = await target.connect()
    sent = a_request(b"Expect: 100-continue\r\n")
    wire.writer.write(sent.removesuffix(BODY))
    assert (await wire.read_response(has_body=False))[0] == 100
    wire.writer.write(BODY)
    assert (await wire.read_response())[0] == 200
    wire.writer.close()


async def test_head_has_a_length_and_no_body(target: Target) -> None:
    wire = await target.connect()
    for _ in range(2):
        wire.writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        status, fields, _ = await wire.read_response(has_body=False)
        assert status == 200
        assert int(fields["content-length"]) > 2
    wire.writer.close()


async def test_connection_close_is_honoured(target: Target) -> None:
    answered = await target.exchange(a_request(b"Connection: close\r\n"))
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answered.lower()


async def test_http_10_gets_no_chunks_and_is_closed(target: Target) -> None:
    body = BODY[:-1] + b',"stream":true}'
    answered = await target.exchange(a_request(body=body, line=b"POST " + PATH + b" HTTP/1.0"))
    assert b"transfer-encoding" not in answered.lower()
    assert answered.endswith(b"data: [DONE]\n\n")
    assert answered.count(b'"content": "t') == 2


async def test_absolute_targets_and_leading_blank_lines_are_accepted(target: Target) -> None:
    wire = await target.connect()
    wire.writer.write(b"\r\n" + a_request(line=b"POST http://other" + PATH + b" HTTP/1.1"))
    assert (await wire.read_response())[0] == 200
    wire.writer.close()


async def test_an_upgrade_header_is_ignored(target: Target) -> None:
    wire = await target.connect()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    for _ in range(2):
        wire.writer.write(a_request(upgrade))
        assert (await wire.read_response())[0] == 200
    assert target.node.bodies == [BODY, BODY]
    wire.writer.close()


async def test_an_upgrade_header_does_not_hide_connection_close(target: Target) -> None:
    options = b"Connection: close\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    answered = await target.exchange(a_request(options) + a_request())
    assert answered.count(b"HTTP/1.1 200 ") == 1
    old = a_request(b"Connection: Upgrade\r\nUpgrade: h2c\r\n", line=b"POST " + PATH + b" HTTP/1.0")
    answered = await target.exchange(old + a_request())
    assert answered.count(b" 200 OK\r\n") == 1


async def test_a_half_closed_connection_cancels_its_request(target: Target) -> None:
    target.node.ttft_s = 30
    wire = await target.connect()
    wire.writer.write(a_request())
    await target.node.until(lambda: target.node.running == 1)
    wire.writer.write_eof()
    await target.node.until(lambda: target.node.cancelled == 1)
    assert await wire.rest() == b""
    wire.writer.close()


SMUGGLED = a_request(body=BODY.replace(b"hello", b"smuggled"))
TE = b"Transfer-Encoding: chunked\r\n"
HEAD = b"POST " + PATH + b" HTTP/1.1\r\n" + AUTH
AMBIGUOUS = {
    "cl-and-te": HEAD + TE + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "te-and-cl": HEAD + b"Content-Length: 5\r\n" + TE + b"\r\n0\r\n\r\n" + SMUGGLED,
    "two-lengths": HEAD + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
    "same-length-twice": HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
    "length-list": HEAD + b"Content-Length: 5, 5\r\n\r\nabcde",
    "length-plus": HEAD + b"Content-Length: +5\r\n\r\nabcde",
    "length-minus": HEAD + b"Content-Length: -5\r\n\r\nabcde",
    "length-hex": HEAD + b"Content-Length: 0x5\r\n\r\nabcde",
    "length-huge": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "te-identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + SMUGGLED,
    "te-xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "te-not-last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "te-twice": HEAD + TE + TE + b"\r\n0\r\n\r\n" + SMUGGLED,
    "te-strange-then-chunked": HEAD + b"Transfer-Encoding: a: b\r\n" + TE + b"\r\n0\r\n\r\n",
    "te-in-an-upgrade": HEAD
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: a: b\r\n"
    + TE
    + b"\r\n0\r\n\r\n",
    "te-space-colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "te-folded": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunk-minus": chunked(last=b"-5\r\nabcde\r\n0\r\n\r\n"),
    "chunk-0x": chunked(last=b"0x5\r\nabcde\r\n0\r\n\r\n"),
    "chunk-overflow": chunked(last=b"fffffffffffffffff5\r\nabcde\r\n0\r\n\r\n"),
    "chunk-too-short": chunked(last=b"3\r\nabcde\r\n0\r\n\r\n"),
    "chunk-bare-lf": chunked(last=b"5\nabcde\n0\n\n"),
    "chunk-ext-lf": chunked(last=b"5;a\nb\r\nabcde\r\n0\r\n\r\n"),
    "bare-lf-head": HEAD.replace(b"\r\n", b"\n") + b"\n",
    "bare-cr": HEAD + b"X: a\rY: b\r\n\r\n",
    "nul": HEAD + b"X: a\0b\r\n\r\n",
    "obs-fold": HEAD + b"X: a\r\n b\r\n\r\n",
    "no-colon": HEAD + b"nonsense\r\n\r\n",
    "empty-name": HEAD + b": x\r\n\r\n",
    "two-hosts": HEAD + b"Host: y\r\n\r\n",
    "no-host": b"POST " + PATH + b" HTTP/1.1\r\n\r\n",
    "version": HEAD.replace(b"HTTP/1.1", b"HTTP/1.2") + b"\r\n",
    "space-in-target": HEAD.replace(PATH, b"/a b") + b"\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "long-line": b"POST /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + AUTH + b"\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_an_ambiguous_request_is_refused(target: Target, name: str) -> None:
    answered = await target.exchange(AMBIGUOUS[name])
    assert answered == b"" or answered.split(b" ", 2)[1][:1] == b"4", answered[:200]
    assert target.node.requests == 0
    assert answered.count(b"HTTP/1.1 ") <= 1


async def test_a_malformed_request_is_answered_after_those_before_it(tmp_path: Path) -> None:
    # Not against aiohttp, which drops the earlier requests.
    async with serve_with_router(tmp_path) as target:
        target.node.ttft_s = 0.05
        answered = await target.exchange(a_request() + a_request() + b"nonsense\r\n\r\n")
        statuses = [part[:3] for part in answered.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200", b"200", b"400"]


async def test_malformed_requests_do_not_affect_other_connections(tmp_path: Path) -> None:
    async with serve_with_router(tmp_path) as target:
        target.node.itl_s = 0.01
        wire = await target.connect()
        body = BODY.replace(b":2,", b":100,")[:-1] + b',"stream":true}'
        wire.writer.write(a_request(body=body))
        for sent in AMBIGUOUS.values():
            bad = await target.connect()
            bad.writer.write(sent)
            await bad.writer.drain()
            bad.writer.transport.abort()
        status, _, answered = await wire.read_response()
        assert status == 200
        assert answered.count(b'"content": "t') == 100
        assert target.node.requests == 1
        wire.writer.close()
