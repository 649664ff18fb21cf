"""`python -m router`: the public endpoint of one PoP, in one process or several."""

import asyncio
import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final, NoReturn

import click
import msgspec

from isochrone.service.config import ConfigError, load_config
from isochrone.service.files import lock_state_folder
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from router.config import RouterConfig
from router.processes import WORKER_ENV

MEMORY: Final = "/dev/shm"  # noqa: S108 - in it we make a folder that nobody can foretell


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--processes", type=click.IntRange(0), help="How many share the port; 0: one a core.")
def main(config: Path | None, processes: int | None) -> NoReturn:
    """Answer this PoP's users from the replica that gives the first token soonest."""
    try:
        settings = load_config(RouterConfig, config, os.environ, "ISOCHRONE_ROUTER_")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    wanted = settings.processes if processes is None else processes
    settings = msgspec.structs.replace(settings, processes=wanted or os.cpu_count() or 1)
    setup_logs("router", settings.log_level)
    if settings.processes > 1:
        _share_metrics()
    # After that: the metrics library looks at the environment as it is imported.
    from router.app import run

    async def serve(stopping: asyncio.Event) -> int:
        if WORKER_ENV in os.environ:
            # Its folder is in the main process's.
            return await run(settings, stopping)
        with lock_state_folder(settings.state_folder):
            return await run(settings, stopping)

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
