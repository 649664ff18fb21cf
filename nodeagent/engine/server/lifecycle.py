"""The life of an engine's process, whatever its model does: load, serve, drain, end."""

import asyncio
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from isochrone.service.config import ConfigError
from isochrone.service.http_server import HttpServerLimits, serve_http_unix
from isochrone.wire.engine import EngineConfig
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.server.http_routes import Server, as_openai
from nodeagent.engine.server.listen_socket import clear_socket

log = logging.getLogger(__name__)

_FAILED_S: Final = 1.0
_STEP_END_S: Final = 10.0
_HEAD_TIMEOUT_S: Final = 2.0
"""An agent on this machine sends a head at once. Who asks nothing is gone before the agent, whom
they may keep out, has missed as many answers as it takes for an outage."""

Loaded = TypeVar("Loaded")


async def serve(
    config: EngineConfig,
    stopping: asyncio.Event,
    load: Callable[[], Loaded],
    begin: Callable[[Loaded, Callable[[], None]], Server],
    leave: Callable[[], None] = lambda: None,
) -> int:
    """Serve what `load` loads; 0 after a drain, 1 where its thread failed.

    `begin` is told whom to tell of that. `leave` is called where it is stopped while it loads.
    """
    started_s = time.monotonic()
    clear_socket(Path(config.socket))
    loading = asyncio.create_task(asyncio.to_thread(load))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # A thread cannot be stopped midway, and nothing is served yet: leave without it.
        log.info("stopped while loading")
        leave()
        os._exit(0)
    try:
        loaded = loading.result()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    died = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_death() -> None:
        loop.call_soon_threadsafe(died.set)

    server = begin(loaded, on_death)
    server.worker.start()
    path = Path(config.socket)
    try:
        async with serve_http_unix(server.app(), path, limits=_limits(), encode_error=as_openai):
            _say_ready(config, server, time.monotonic() - started_s)
            death = asyncio.create_task(died.wait())
            await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            await _end(config, server)
    finally:
        stop.cancel()
        path.unlink(missing_ok=True)
    return 1 if server.worker.died else 0


def _limits() -> HttpServerLimits:
    """Half of the descriptors are for connections: a step that finds none left is the last."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = HttpServerLimits(head_timeout_s=_HEAD_TIMEOUT_S, shutdown_timeout_s=1.0)
    if most == resource.RLIM_INFINITY:
        return usual
    return replace(usual, connections_max=min(most // 2, usual.connections_max))


async def _end(config: EngineConfig, server: Server) -> None:
    """Let what runs finish within `drain_s`, unless the engine itself has failed."""
    entrance = server.entrance
    entrance.draining = True
    if server.worker.died:
        server.fail_all("cannot go on: the engine failed")
        await entrance.wait_empty(_FAILED_S)
        return
    log.info("draining", extra={"fields": {"open": entrance.open}})
    if not await entrance.wait_empty(config.drain_s):
        log.warning("drain deadline passed", extra={"fields": {"open": entrance.open}})
        server.fail_all("cannot go on: the engine is stopping")
        await entrance.wait_empty(_FAILED_S)
    if not await asyncio.to_thread(server.worker.stop, _STEP_END_S):
        log.warning("the last step did not end in time")
        return
    await asyncio.to_thread(server.close)


def _say_ready(config: EngineConfig, server: Server, startup_s: float) -> None:
    counts = server.counts()
    ready = {
        "ready": True,
        "model": config.served_name,
        "kind": server.kind,
        "socket": config.socket,
        "load_s": counts["load_s"],
        "startup_s": round(startup_s, 3),
        "weights_bytes": counts["weights_bytes"],
        "kv_blocks": server.worker.counts().get("kv_blocks_total", 0),
        "context_tokens": server.context_tokens,
    }
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
    log.info("ready", extra={"fields": ready})
