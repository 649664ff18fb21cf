"""Run one engine: `python -m nodeagent.engine --config FILE.json`."""

import argparse
import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path

import torch

from isochrone.service.config import ConfigError
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from isochrone.wire.engine import EngineConfig
from nodeagent.engine.config import read_config
from nodeagent.engine.distributed.worker import follow, follow_from_afar
from nodeagent.engine.distributed.worker_group import Crew, muster
from nodeagent.engine.encoder.loading import load_encoder
from nodeagent.engine.encoder.server import EncoderServer
from nodeagent.engine.kernels.cpu.kernels import kernels
from nodeagent.engine.loading import load, meeting, ranks_here, split_of
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.server import lifecycle as serving
from nodeagent.engine.server.chat_app import EngineServer
from nodeagent.engine.server.standby import wait_for_order
from nodeagent.engine.weights.encoder import is_encoder

log = logging.getLogger(__name__)


def main() -> None:
    """Read the arguments, load the model, serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m nodeagent.engine", description=__doc__)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--config", type=Path, help="JSON file: EngineConfig")
    kinds.add_argument("--standby", action="store_true", help="wait on standard input for --config")
    arguments = parser.parse_args()
    if arguments.standby:
        # Built, loaded and tried before anybody waits; by one thread, for ranks are forked from
        # here, and would wait for OpenMP's other threads, which no fork takes along.
        torch.set_num_threads(1)
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
    try:
        reads = is_encoder(Path(config.model_path))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if not reads:
        begin = partial(EngineServer, config, crew)
        return await serving.serve(config, stopping, partial(load, config, crew), begin, crew.kill)
    if split_of(config).ranks > 1:
        raise ConfigError(f"cannot split {config.model_path}: only decoders are split")
    begin_to_read = partial(EncoderServer, config)
    return await serving.serve(config, stopping, partial(load_encoder, config), begin_to_read)


if __name__ == "__main__":
    main()
