"""`python -m nodeagent`: the agent of one GPU server."""

import asyncio
import os
from pathlib import Path
from typing import Final, NoReturn

import click

from isochrone.service.config import load_config
from isochrone.service.files import lock_state_folder
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from nodeagent.app import serve
from nodeagent.config import OLD_NAMES, NodeConfig

ENV_PREFIX: Final = "ISOCHRONE_NODE_"


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML).")
def main(config: Path | None) -> NoReturn:
    """Run on this server the replicas that the scheduler assigns to it."""

    async def run(stopping: asyncio.Event) -> int:
        setup_logs("nodeagent")  # for warnings about the configuration
        settings = load_config(NodeConfig, config, os.environ, ENV_PREFIX, OLD_NAMES)
        setup_logs("nodeagent", settings.log_level)
        with lock_state_folder(settings.state):
            return await serve(settings, stopping, config)

    run_service(run)


if __name__ == "__main__":
    main()
