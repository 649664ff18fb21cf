"""Run one engine: `python -m nodeagent.engine --config FILE.json`."""

import argparse
import asyncio
import logging
import os
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import web

from isochrone.service.config import ConfigError
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from isochrone.wire.engine import EngineConfig
from nodeagent.engine.adapters import Adapters
from nodeagent.engine.checkpoint.encoder import is_encoder
from nodeagent.engine.clients import Clients
from nodeagent.engine.config import read_config
from nodeagent.engine.constrain.compiling import Grammars
from nodeagent.engine.encoder.serving import serve_encoder
from nodeagent.engine.listening import clear_socket, listen, remove_socket
from nodeagent.engine.loading import Loaded, load, meeting, ranks_here, split_of
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.native.kernels import kernels
from nodeagent.engine.parallel.crew import Crew, muster
from nodeagent.engine.parallel.follower import follow, follow_from_afar
from nodeagent.engine.server import EngineServer
from nodeagent.engine.standby import wait_for_order
from nodeagent.engine.step import Engine
from nodeagent.engine.worker import Worker

log = logging.getLogger(__name__)

_PROBE_S = 1.0
_STEP_END_S = 10.0


def main() -> None:
    """Read the arguments, load the model, serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m nodeagent.engine", description=__doc__)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--config", type=Path, help="JSON file: EngineConfig")
    kinds.add_argument("--standby", action="store_true", help="wait on standard input for --config")
    arguments = parser.parse_args()
    if arguments.standby:
        # Built, loaded and tried before anybody waits.
        kernels()
        order = wait_for_order()
        if order is None:
            return
        arguments = parser.parse_args(order.arguments)
    path: Path = arguments.config
    try:
        config = read_config(path)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from error
    if config.group is not None and config.group.place:
        follow_from_afar(config, config.group)
    crew = muster(len(ranks_here(config)), lambda rank, channel: follow(config, rank, channel))
    setup_logs("engine")
    run_service(lambda stopping: _serve_with(crew, config, stopping))


async def _serve_with(crew: Crew, config: EngineConfig, stopping: asyncio.Event) -> int:
    split, lost = split_of(config).ranks > 1, ""
    try:
        code = await serve(config, crew, stopping)
    finally:
        lost = crew.lost()
        await asyncio.to_thread(crew.end)
        meeting(config).unlink(missing_ok=True)
    if lost:
        log.error("cannot go on: %s", lost)
    if split and code:
        # The step may wait for the lost rank still, and with it whatever ends a process in order.
        os._exit(code)
    return code


async def serve(config: EngineConfig, crew: Crew, stopping: asyncio.Event) -> int:
    """Serve the model of `config`; 0 after a drain, 1 where the engine or a rank failed."""
    started_s = time.monotonic()
    clear_socket(Path(config.socket))
    try:
        if is_encoder(Path(config.model_path)):
            if split_of(config).ranks > 1:
                raise ConfigError(f"cannot split {config.model_path}: only decoders are split")
            return await serve_encoder(config, stopping, started_s)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    loading = asyncio.create_task(asyncio.to_thread(load, config, crew))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        # A thread cannot be stopped midway, and nothing is served yet: leave without it.
        log.info("stopped while loading")
        crew.kill()
        os._exit(0)
    try:
        loaded = loading.result()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    died = asyncio.Event()
    loop = asyncio.get_running_loop()
    clients = Clients(
        loaded.vocabulary,
        config.sequences_max + config.waiting_max,
        config.client_queue_max,
        loaded.engine.speculation,
    )

    def on_death() -> None:
        loop.call_soon_threadsafe(died.set)

    worker = Worker(loaded.engine, clients.publish, on_death)
    grammars = Grammars(loaded.vocabulary)
    adapters = Adapters(config, loaded.adding, loaded.dtype)
    server = EngineServer(config, loaded, worker, clients, int(time.time()), grammars, adapters)
    worker.start()
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None
    )
    await runner.setup()
    try:
        await listen(runner, Path(config.socket))
        _say_ready(config, loaded, time.monotonic() - started_s)
        death = asyncio.create_task(died.wait())
        for member in crew.members:
            loop.add_reader(member.descriptor, worker.fail)
        await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        await _end(config, clients, worker, loaded.engine)
    finally:
        stop.cancel()
        grammars.close()
        await runner.cleanup()
        remove_socket(Path(config.socket))
    return 1 if worker.died else 0


async def _end(config: EngineConfig, clients: Clients, worker: Worker, engine: Engine) -> None:
    """Let what runs finish within `drain_s`, unless the engine itself has failed."""
    clients.draining = True
    if worker.died:
        clients.fail_all("cannot go on: the engine failed")
        await clients.wait_empty(_PROBE_S)
        return
    log.info("draining", extra={"fields": {"open": len(clients)}})
    if not await clients.wait_empty(config.drain_s):
        log.warning("drain deadline passed", extra={"fields": {"open": len(clients)}})
        clients.fail_all("cannot go on: the engine is stopping")
        await clients.wait_empty(_PROBE_S)
    if not await asyncio.to_thread(worker.stop, _STEP_END_S):
        log.warning("the last step did not end in time")
        return
    await asyncio.to_thread(engine.close)


def _say_ready(config: EngineConfig, loaded: Loaded, startup_s: float) -> None:
    ready = {
        "ready": True,
        "model": config.served_name,
        "socket": config.socket,
        "load_s": loaded.load_s,
        "startup_s": round(startup_s, 3),
        "weights_bytes": loaded.weights_bytes,
        "kv_blocks": loaded.engine.batching.blocks.total,
        "context_tokens": loaded.context_tokens,
    }
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
    log.info("ready", extra={"fields": ready})


if __name__ == "__main__":
    main()
