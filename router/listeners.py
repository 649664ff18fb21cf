"""The ports that a router listens on: the public one, and a private one for metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ssl import SSLContext
from typing import NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry

from isochrone.service.metrics import metrics_handler
from isochrone.service.network.connection_count import ConnectionCount, tls_protocol_factory
from isochrone.service.network.http_server import BACKLOG, listen_error, serve_http
from router.apis.auxiliary_server import open_auxiliary_server
from router.config import RouterConfig
from router.dataplane.server import PublicServer
from router.dataplane.upstream import Upstream


class RouterPorts(NamedTuple):
    """The ports in use; `private` is 0 if there is no private listener."""

    public: int
    private: int


@asynccontextmanager
async def open_listeners(
    config: RouterConfig,
    *,
    server: PublicServer,
    auxiliary_app: web.Application,
    upstream: Upstream,
    registry: CollectorRegistry,
    context: SSLContext | None,
) -> AsyncIterator[RouterPorts]:
    """Listen. On exit, accept no more connections and wait for the open requests.

    `/metrics` is on the private port, or on the public one if there is no private one.
    """
    show_metrics = metrics_handler(registry)
    private_port = 0
    async with AsyncExitStack() as stack:
        if config.private_host:
            private = web.Application()
            private.router.add_get("/metrics", show_metrics)
            private_server = serve_http(private, config.private_host, config.private_port)
            private_port = await stack.enter_async_context(private_server)
        else:
            auxiliary_app.router.add_get("/metrics", show_metrics)
        await stack.enter_async_context(open_auxiliary_server(auxiliary_app, upstream))
        connections = ConnectionCount(config.connections_max, config.connections_per_address_max)
        factory = tls_protocol_factory(
            server.make_connection, context, connections, config.head_timeout_s
        )
        make_protocol = await stack.enter_async_context(factory)
        try:
            listener = await asyncio.get_running_loop().create_server(
                make_protocol,
                config.host,
                config.port,
                backlog=BACKLOG,
                reuse_port=config.processes > 1 or None,
            )
        except OSError as error:
            raise listen_error(config.host, config.port, error) from error
        stack.push_async_callback(server.drain, config.drain_timeout_s)
        stack.callback(listener.close)
        yield RouterPorts(listener.sockets[0].getsockname()[1], private_port)
