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
from isochrone.service.machine_share import usable_cores
from isochrone.service.run import run_service
from router.config import RouterConfig
from router.processes import WORKER_ENV

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the folder made in it has a random name


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="TOML file.")
@click.option(
    "--processes",
    type=click.IntRange(0),
    help="Processes that share the port; 0: one per usable core.",
)
def main(config: Path | None, processes: int | None) -> NoReturn:
    """Serve the public endpoint of a PoP: send each request to the replica that answers soonest."""
    try:
        settings = load_config(RouterConfig, config, os.environ, "ISOCHRONE_ROUTER_")
        setup_logs("router", settings.log_level)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    count = settings.processes if processes is None else processes
    settings = msgspec.structs.replace(settings, processes=count or usable_cores())
    if settings.processes > 1:
        _share_metrics()
    # Imported only now, because the metrics library reads the environment when it is imported.
    from router.serve import run

    async def serve(stopping: asyncio.Event) -> int:
        if WORKER_ENV in os.environ:
            # A worker's state folder is inside the main process's, which is locked already.
            return await run(settings, stopping)
        with lock_state_folder(settings.state_folder):
            return await run(settings, stopping)

    run_service(serve)


def _share_metrics() -> None:
    """Choose a folder in memory for the metrics that all processes of this router share.

    The metrics library maps its files into memory. On a full disk, a write to a mapped file would
    kill the process (SIGBUS).
    """
    if WORKER_ENV in os.environ:
        # The main process has set it.
        return
    memory = Path(os.environ.get("RUNTIME_DIRECTORY") or SHARED_MEMORY)
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for old_folder in parent.glob("isochrone-router-*-*"):
        if not Path("/proc", old_folder.name.split("-")[2]).exists():
            shutil.rmtree(old_folder, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"isochrone-router-{os.getpid()}-", dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder


if __name__ == "__main__":
    main()
