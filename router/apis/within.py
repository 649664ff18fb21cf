"""The aiohttp server that answers cold routes: in this process, over sockets of nobody else."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from router.apis.doors import COLD
from router.dataplane.upstream import Upstream


@asynccontextmanager
async def open_cold(app: web.Application, upstream: Upstream) -> AsyncIterator[None]:
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
