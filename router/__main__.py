"""`python -m router --config F.toml`, or with `--join TOKEN` on its first start."""

import argparse
import asyncio
import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from isochrone.service.config import ConfigError, load_config
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from router.config import RouterConfig
from router.processes import WORKER_ENV

MEMORY: Final = "/dev/shm"  # noqa: S108 - in it we make a folder that nobody can foretell


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
        _share_metrics()
    # After that: the metrics library looks at the environment as it is imported.
    from router.app import run

    async def serve(stopping: asyncio.Event) -> int:
        return await run(config, stopping)

    run_service(serve)


def _share_metrics() -> None:
    """Let all processes write their metrics where the main one reads them: in memory.

    These files are mapped. On a disk that is full, writing to one would end the process (SIGBUS).
    """
    if WORKER_ENV in os.environ:
        # The main process has said where.
        return
    memory = Path(os.environ.get("RUNTIME_DIRECTORY") or MEMORY)
    home = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for left in home.glob("isochrone-router-*-*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"isochrone-router-{os.getpid()}-", dir=home)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder


if __name__ == "__main__":
    main()
