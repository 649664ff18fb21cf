"""Run one engine: `python -m nodeagent.engine --config FILE.json`."""

import argparse
import asyncio
import gc
import logging
import os
import sys
from functools import partial
from pathlib import Path

import torch

from isochrone.service.config import ConfigError
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.config import read_config
from nodeagent.engine.encoder.bert_folder import is_encoder
from nodeagent.engine.encoder.loading import load_encoder
from nodeagent.engine.encoder.server import EncoderServer
from nodeagent.engine.kernels.cpu.library import cpu_kernels
from nodeagent.engine.loading import load_engine
from nodeagent.engine.server import lifecycle
from nodeagent.engine.server.generation_server import GenerationServer
from nodeagent.engine.server.standby import wait_for_order
from nodeagent.engine.workers.shard_loading import local_ranks, parallel_config, rendezvous_file
from nodeagent.engine.workers.worker import run_remote_workers, run_worker
from nodeagent.engine.workers.worker_group import LOST_S, WorkerGroup, fork_workers

log = logging.getLogger(__name__)


def main() -> None:
    """Read the arguments, load the model, and serve until a signal stops it."""
    parser = argparse.ArgumentParser(prog="python -m nodeagent.engine", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--config", type=Path, help="JSON file: EngineConfig")
    mode.add_argument("--standby", action="store_true", help="wait on standard input for --config")
    arguments = parser.parse_args()
    if arguments.standby:
        # Compile, load and test the kernels before a model is needed. On one thread, because the
        # workers are forked from here, and a fork would lack OpenMP's other threads and hang.
        torch.set_num_threads(1)
        cpu_kernels()
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
        run_remote_workers(config, config.group)
    # The objects of imported modules, nearly all there are, are not searched for garbage again. At
    # each sleep that would take as long as loading a small model.
    gc.freeze()
    workers = fork_workers(len(local_ranks(config)), partial(run_worker, config))
    setup_logs("engine")
    run_service(lambda stopping: _serve_with_workers(workers, config, stopping))


async def _serve_with_workers(
    workers: WorkerGroup, config: EngineConfig, stopping: asyncio.Event
) -> int:
    """Serve, then shut the workers down; return the exit code."""
    is_split, lost, code = parallel_config(config).ranks > 1, "", 1
    try:
        code = await serve(config, workers, stopping)
    finally:
        lost = await asyncio.to_thread(workers.describe_lost, LOST_S if code else 0.0)
        await asyncio.to_thread(workers.shut_down)
        rendezvous_file(config).unlink(missing_ok=True)
    if lost:
        log.error("cannot go on: %s", lost)
    if is_split and code:
        # The step thread may still wait for the lost rank, which would block an orderly exit.
        os._exit(code)
    return code


async def serve(config: EngineConfig, workers: WorkerGroup, stopping: asyncio.Event) -> int:
    """Serve the model of `config`; return 0 after a drain, 1 if the engine or a worker failed."""
    try:
        is_encoder_model = is_encoder(Path(config.model_path))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if not is_encoder_model:
        load = partial(load_engine, config, workers)
        make_server = partial(GenerationServer, config, workers)
        return await lifecycle.serve(config, stopping, load, make_server, workers.kill)
    if parallel_config(config).ranks > 1:
        raise ConfigError(f"cannot split {config.model_path}: only decoders are split")
    load_texts = partial(load_encoder, config)
    return await lifecycle.serve(config, stopping, load_texts, partial(EncoderServer, config))


if __name__ == "__main__":
    main()
