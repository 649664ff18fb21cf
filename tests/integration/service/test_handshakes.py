"""Unfinished TLS handshakes hold no more descriptors than the connection limit.

Tested with uvloop too, which the services use.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from isochrone.service.network.http_server import HttpServerLimits, serve_http
from isochrone.service.trust.identity import SCHEDULER_NAME, Authority
from isochrone.service.trust.tls import control_server_context, verifying_context
from tests.integration.service.test_tls import NOW
from tests.system.harness import until

FEW = 10
LIMITS = HttpServerLimits(head_timeout_s=3.0, connections_per_address_max=FEW)
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def answer(request: web.Request) -> web.Response:
    return web.Response(text="served")


async def flooded(folder: Path) -> None:
    async with attacked(folder, LIMITS) as (is_served, count):
        assert not await is_served(), "this address has reached its limit"
        assert count() <= 5 * FEW + FEW
        # Each is closed after the head timeout, which frees its place.
        await until("served again", is_served, 10.0)


async def held(folder: Path) -> None:
    limits = HttpServerLimits(head_timeout_s=3600.0, connections_max=FEW)
    async with attacked(folder, limits) as (is_served, count):
        await until("the oldest handshakes make room", is_served, 10.0)
        assert count() <= 5 * FEW + FEW


@asynccontextmanager
async def attacked(
    folder: Path, limits: HttpServerLimits
) -> AsyncIterator[tuple[Callable[[], Awaitable[bool]], Callable[[], int]]]:
    """Hold more handshakes than a server allows; yield who asks it, and counts descriptors."""
    authority = Authority.create(folder / "ca", "ours", NOW)
    trust, app = verifying_context(authority.ca_pem), web.Application()
    app.router.add_get("/", answer)
    context = control_server_context(authority, NOW)
    async with (
        serve_http(app, "127.0.0.1", 0, limits=limits, ssl_context=context) as port,
        AsyncExitStack() as strangers,
    ):
        before = descriptors()

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trust, server_hostname=SCHEDULER_NAME
            )
            writer.write(REQUEST)
            try:
                return await reader.read()
            finally:
                writer.close()

        async def is_served() -> bool:
            try:
                return (await ask()).endswith(b"served")
            except (OSError, ssl.SSLError):
                return False

        async def is_bounded() -> bool:
            # The clients' ends are descriptors of this process too.
            return descriptors() - before <= 5 * FEW + FEW

        await until("served", is_served, 5.0)
        for _ in range(5 * FEW):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            strangers.callback(writer.close)
        await until("those over the limit are closed", is_bounded, 2.0)
        yield is_served, lambda: descriptors() - before


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_handshakes_count_as_connections_and_time_out(
    tmp_path: Path, run: Callable[..., None]
) -> None:
    run(flooded(tmp_path))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_unfinished_handshakes_keep_nobody_out(tmp_path: Path, run: Callable[..., None]) -> None:
    run(held(tmp_path))
