"""Runs a router: joins the cluster, starts the parts that `app.py` composes, and waits for the
end."""

import asyncio
import logging
import os
import socket

from isochrone.service.config import ConfigError
from isochrone.service.systemd import notify
from isochrone.service.trust.joining import load_or_join
from isochrone.wire.peers.control import PeerRole
from router import build
from router.app import open_router
from router.config import RouterConfig
from router.processes import WORKER_ENV, parse_worker_identity, worker_config

log = logging.getLogger(__name__)


async def run(config: RouterConfig, stopping: asyncio.Event) -> int:
    """Serve until `stopping` is set, then drain; return the exit code."""
    identity = await load_or_join(
        urls=config.schedulers,
        token_file=config.join_token_file,
        role=PeerRole.ROUTER,
        name=config.name or socket.gethostname().lower(),
        folder=config.state_folder,
    )
    worker = parse_worker_identity(os.environ.pop(WORKER_ENV, ""))
    if worker is not None:
        config = worker_config(worker, config)
    try:
        async with open_router(config, identity, worker) as app:
            fields = {"port": app.port, "pop": identity.pop, "router": identity.name}
            log.info("serving", extra={"fields": fields | build.facts()})
            notify("READY=1")
            await _wait_for_any(stopping, app.stopping)
            notify("STOPPING=1")
    except BaseExceptionGroup as group:
        config_errors = group.subgroup(ConfigError)
        if config_errors is None:
            raise
        raise ConfigError(str(config_errors.exceptions[0])) from group
    return 0


async def _wait_for_any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
