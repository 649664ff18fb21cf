"""The life of an engine process, whatever its model does: load, serve, drain, end."""

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
from isochrone.service.network.http_server import (
    HttpServerLimits,
    openai_json_error,
    serve_http_unix,
)
from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.server.http_routes import ModelServer
from nodeagent.engine.server.listen_socket import clear_socket

log = logging.getLogger(__name__)

_FAIL_TIMEOUT_S: Final = 1.0
"""Time for failed requests to write their last frame."""
_LAST_STEP_TIMEOUT_S: Final = 10.0
_HEAD_TIMEOUT_S: Final = 2.0
"""Time for a connection to send its request head. The agent runs on the same machine and sends at
once. Idle connections can keep the agent out, so they must be closed before it has missed enough
health answers to report an outage."""

Loaded = TypeVar("Loaded")


async def serve(
    config: EngineConfig,
    stopping: asyncio.Event,
    load: Callable[[], Loaded],
    make_server: Callable[[Loaded, Callable[[], None]], ModelServer],
    on_abort: Callable[[], None] = lambda: None,
) -> int:
    """Load a model with `load` and serve it; return 0 after a drain, 1 if its step thread failed.

    `make_server` gets the loaded model and a callback for the death of its step thread. `on_abort`
    is called if `stopping` is set during the load.
    """
    started_s = time.monotonic()
    clear_socket(Path(config.socket))
    loading = asyncio.create_task(asyncio.to_thread(load))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # The loading thread cannot be stopped, and nothing is served yet: exit without it.
        log.info("stopped while loading")
        on_abort()
        os._exit(0)
    try:
        loaded = loading.result()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    died = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_death() -> None:
        loop.call_soon_threadsafe(died.set)

    server = make_server(loaded, on_death)
    server.worker.start()
    path = Path(config.socket)
    try:
        async with serve_http_unix(
            server.app(), path, limits=_connection_limits(), encode_error=openai_json_error
        ):
            _announce_ready(config, server, time.monotonic() - started_s)
            death = asyncio.create_task(died.wait())
            await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            await _shut_down(config, server)
    finally:
        stop.cancel()
        path.unlink(missing_ok=True)
    return 1 if server.worker.died else 0


def _connection_limits() -> HttpServerLimits:
    """Return limits that leave half of the file descriptors free: a step without one would fail."""
    descriptors_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = HttpServerLimits(head_timeout_s=_HEAD_TIMEOUT_S, shutdown_timeout_s=1.0)
    if descriptors_max == resource.RLIM_INFINITY:
        return limits
    return replace(limits, connections_max=min(descriptors_max // 2, limits.connections_max))


async def _shut_down(config: EngineConfig, server: ModelServer) -> None:
    """Let open requests finish within `drain_s`, unless the engine itself has failed."""
    inflight = server.inflight
    inflight.draining = True
    if server.worker.died:
        server.fail_all("cannot continue: the engine failed")
        await inflight.wait_idle(_FAIL_TIMEOUT_S)
        return
    log.info("draining", extra={"fields": {"open": inflight.in_flight}})
    if not await inflight.wait_idle(config.drain_s):
        log.warning("drain deadline passed", extra={"fields": {"open": inflight.in_flight}})
        server.fail_all("cannot continue: the engine is stopping")
        await inflight.wait_idle(_FAIL_TIMEOUT_S)
    if not await asyncio.to_thread(server.worker.stop, _LAST_STEP_TIMEOUT_S):
        log.warning("the last step did not end in time")
        return
    await asyncio.to_thread(server.close)


def _announce_ready(config: EngineConfig, server: ModelServer, startup_s: float) -> None:
    """Write one JSON line to standard output for the agent, and the same to the log."""
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
