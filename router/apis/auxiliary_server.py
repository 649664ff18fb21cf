"""Auxiliary routes (everything but inference), answered by an aiohttp server in this process.

The router's own HTTP server receives every request on one port and forwards these through a socket
pair. So one strict parser guards all routes, and aiohttp serves those whose speed does not matter.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NodeId
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.dataplane.http1 import format_headers
from router.dataplane.http_messages import HttpRequest, HttpResponse
from router.dataplane.server import ClientConnection
from router.dataplane.upstream import Upstream

AUXILIARY: Final = NodeId("_auxiliary")
TIMEOUT_S: Final = 60.0
BYTES_MAX: Final = 64 * 1024 * 1024
FIELD_BYTES_MAX: Final = 8000
"""The longest target or header that is forwarded. aiohttp refuses longer ones with a traceback in
the log, which every stranger could fill."""

_FORWARDED: Final = frozenset(
    {
        *(b"authorization", b"content-type", b"accept", b"x-request-id"),
        *(b"x-api-key", b"anthropic-version"),
    }
)
"""Request headers that the auxiliary server uses."""

_REWRITTEN: Final = frozenset(
    {b"connection", b"content-length", b"content-type", b"date", b"server", b"transfer-encoding"}
)
"""Response headers that the router's own server writes itself."""


@asynccontextmanager
async def open_auxiliary_server(app: web.Application, upstream: Upstream) -> AsyncIterator[None]:
    """Serve `app` to this process only; `upstream` reaches it as the node AUXILIARY."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    server = runner.server
    assert server is not None
    loop = asyncio.get_running_loop()
    accepting: set[asyncio.Task[object]] = set()

    def dial() -> socket.socket:
        client_end, server_end = socket.socketpair()
        task: asyncio.Task[object] = loop.create_task(
            loop.connect_accepted_socket(server, server_end)
        )
        accepting.add(task)
        task.add_done_callback(accepting.discard)
        return client_end

    upstream.in_process[AUXILIARY] = dial
    try:
        yield
    finally:
        del upstream.in_process[AUXILIARY]
        await runner.cleanup()


async def forward_to_auxiliary(
    upstream: Upstream, request: HttpRequest, client: ClientConnection
) -> None:
    """Let the auxiliary server answer a request."""
    target = f"{request.path}?{request.query}" if request.query else request.path
    # A HEAD is forwarded as a GET: `reply` leaves the body out.
    method = "GET" if request.method == b"HEAD" else request.method.decode()
    forwarded = {name: value for name, value in request.headers.items() if name in _FORWARDED}
    if max(len(target), *map(len, forwarded.values()), 0) > FIELD_BYTES_MAX:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot read the request: its URL or a header has more than {FIELD_BYTES_MAX} bytes",
        )
    node_request = NodeRequest(method, target, _format(forwarded), request.body)
    try:
        exchange = await upstream.fetch(AUXILIARY, AUXILIARY, node_request, TIMEOUT_S, BYTES_MAX)
    except AttemptFailed as error:
        raise ApiError(ErrorCode.INTERNAL, f"cannot answer: {error}") from error
    head = exchange.response_head()
    kept = {name: value for name, value in head.fields.items() if name not in _REWRITTEN}
    client.reply(HttpResponse(head.status, exchange.body, _format(kept), head.content_type))


def _format(fields: dict[bytes, bytes]) -> str:
    return format_headers(
        {name.decode("latin-1"): value.decode("latin-1") for name, value in fields.items()}
    )
