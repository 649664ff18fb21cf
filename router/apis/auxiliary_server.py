"""Cold routes: answered by an aiohttp server in this process, over sockets of nobody else.

So one parser stands before hot and cold alike, at one port, and aiohttp keeps everything in which a
microsecond does not matter.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NodeId
from router.dataplane.exchange import AttemptFailed
from router.dataplane.http1 import lines_of
from router.dataplane.http_messages import HttpRequest, HttpResponse
from router.dataplane.server import ClientConnection
from router.dataplane.upstream import Upstream

COLD: Final = NodeId("_cold")
TIMEOUT_S: Final = 30.0
BYTES_MAX: Final = 64 * 1024 * 1024

_ASKED: Final = frozenset({b"authorization", b"content-type", b"accept", b"x-request-id"})
_ANEW: Final = frozenset(
    {b"connection", b"content-length", b"content-type", b"date", b"server", b"transfer-encoding"}
)
"""Headers of an answer that are written anew: those of one hop, and those of every answer."""


@asynccontextmanager
async def open_auxiliary_server(app: web.Application, upstream: Upstream) -> AsyncIterator[None]:
    """Serve `app` to this process alone, whom `upstream` knows as COLD."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    server = runner.server
    assert server is not None
    loop = asyncio.get_running_loop()
    accepting: set[asyncio.Task[object]] = set()

    def dial() -> socket.socket:
        ours, theirs = socket.socketpair()
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(server, theirs))
        accepting.add(task)
        task.add_done_callback(accepting.discard)
        return ours

    upstream.inside[COLD] = dial
    try:
        yield
    finally:
        del upstream.inside[COLD]
        await runner.cleanup()


async def forward_to_auxiliary(
    upstream: Upstream, request: HttpRequest, client: ClientConnection
) -> None:
    """Have a request answered there."""
    target = f"{request.path}?{request.query}" if request.query else request.path
    # A HEAD is asked as a GET: its answer has no body to wait for, and `reply` sends none.
    method = "GET" if request.method == b"HEAD" else request.method.decode()
    sent = {name: value for name, value in request.headers.items() if name in _ASKED}
    asked = (method, target, _lines(sent), request.body)
    try:
        exchange = await upstream.fetch(COLD, COLD, asked, TIMEOUT_S, BYTES_MAX)
    except AttemptFailed as error:
        raise ApiError(ErrorCode.INTERNAL, f"cannot answer: {error}") from error
    head = exchange.answer()
    told = {name: value for name, value in head.fields.items() if name not in _ANEW}
    client.reply(HttpResponse(head.status, exchange.body, _lines(told), head.content_type))


def _lines(fields: dict[bytes, bytes]) -> str:
    return lines_of({name.decode("latin-1"): one.decode("latin-1") for name, one in fields.items()})
