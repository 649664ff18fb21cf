"""The life of an engine process whose model reads: load, serve, drain, end."""

import asyncio
import logging
import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.encoder.loading import load_encoder
from nodeagent.engine.encoder.server import EncoderServer
from nodeagent.engine.encoder.worker import EncoderWorker
from nodeagent.engine.listening import listen, remove_socket

log = logging.getLogger(__name__)

_STEP_END_S: Final = 10.0


async def serve_encoder(config: EngineConfig, stopping: asyncio.Event, started_s: float) -> int:
    """Serve the model of `config`; 0 after a drain, 1 where the engine failed."""
    loading = asyncio.create_task(asyncio.to_thread(load_encoder, config))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # A thread cannot be stopped midway, and nothing is served yet: leave without it.
        log.info("stopped while loading")
        os._exit(0)
    loaded = loading.result()
    died = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_death() -> None:
        loop.call_soon_threadsafe(died.set)

    worker = EncoderWorker(loaded.model, config.batch_tokens_max, on_death)
    server = EncoderServer(config, loaded, worker, int(time.time()))
    worker.start()
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None
    )
    await runner.setup()
    try:
        await listen(runner, Path(config.socket))
        ready = {
            "ready": True,
            "model": config.served_name,
            "socket": config.socket,
            "kind": loaded.kind,
            "load_s": loaded.load_s,
            "startup_s": round(time.monotonic() - started_s, 3),
            "weights_bytes": loaded.weights_bytes,
            "context_tokens": loaded.context_tokens,
        }
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        log.info("ready", extra={"fields": ready})
        death = asyncio.create_task(died.wait())
        await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        server.draining = True
        if not worker.died and not await server.wait_empty(config.drain_s):
            log.warning("drain deadline passed")
            worker.fail_all("cannot go on: the engine is stopping")
        if not await asyncio.to_thread(worker.stop, _STEP_END_S):
            log.warning("the last step did not end in time")
    finally:
        stop.cancel()
        await runner.cleanup()
        remove_socket(Path(config.socket))
    return 1 if worker.died else 0
