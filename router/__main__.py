"""`python -m router --config F.toml`, or with `--join TOKEN` on its first start."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from isochrone.service.config import ConfigError, load_config
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from router.app import run
from router.config import RouterConfig


def main() -> NoReturn:
    """Read the configuration and serve until told to stop."""
    parser = argparse.ArgumentParser(prog="isochrone-router", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; see router/config.py")
    parser.add_argument("--join", default="", help="one-time join token, for the first start")
    arguments = parser.parse_args()
    try:
        config = load_config(RouterConfig, arguments.config, os.environ, "ISOCHRONE_ROUTER_")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    if arguments.join:
        config = msgspec.structs.replace(config, join_token=arguments.join)
    setup_logs("router", config.log_level)

    async def serve(stopping: asyncio.Event) -> int:
        return await run(config, stopping)

    run_service(serve)


if __name__ == "__main__":
    main()
