"""The metrics page: the Prometheus text of one registry, or of several processes together.

Processes that share a page write their values into the folder `PROMETHEUS_MULTIPROC_DIR`, which
must be set before prometheus_client is first imported.
"""

import os
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client import multiprocess as shared
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest


def metrics_handler(
    registry: CollectorRegistry,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the aiohttp handler of `GET /metrics`."""
    shown = registry
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        shown = CollectorRegistry()
        shared.MultiProcessCollector(shown)  # type: ignore[no-untyped-call]

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(shown), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    return metrics
