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
from router.config import RouterConfig
from router.processes import WORKER_ENV


def main() -> NoReturn:
    """Read the configuration and serve until told to stop."""
    parser = argparse.ArgumentParser(prog="isochrone-router", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; see router/config.py")
    parser.add_argument("--join", default="", help="one-time join token, for the first start")
    parser.add_argument(
        "--processes", type=int, help="how many share the port; default: one a core"
    )
    arguments = parser.parse_args()
    try:
        config = load_config(RouterConfig, arguments.config, os.environ, "ISOCHRONE_ROUTER_")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    if arguments.join:
        config = msgspec.structs.replace(config, join_token=arguments.join)
    if arguments.processes is not None:
        config = msgspec.structs.replace(config, processes=max(0, arguments.processes))
    config = msgspec.structs.replace(config, processes=config.processes or os.cpu_count() or 1)
    setup_logs("router", config.log_level)
    if config.processes > 1:
        _share_metrics(config.state_folder / "metrics")
    # After that: the metrics library looks at the environment as it is imported.
    from router.app import run

    async def serve(stopping: asyncio.Event) -> int:
        return await run(config, stopping)

    run_service(serve)


def _share_metrics(folder: Path) -> None:
    """Let all processes write their metrics where the main one reads them."""
    if WORKER_ENV not in os.environ:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob("*.db"):
            left.unlink(missing_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)


if __name__ == "__main__":
    main()
