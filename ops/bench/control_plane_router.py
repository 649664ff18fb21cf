"""One real router of the control plane benchmark, which records how long its event loop stalls.

    python -m ops.bench.control_plane_router STATE_FOLDER PORT FIGURES URL...

It serves as any router does. When it is stopped it writes its figures to a file.
"""

import asyncio
import sys
from pathlib import Path
from typing import Final

import msgspec

from isochrone.service.files import write_atomic
from isochrone.service.logs import setup_logs
from isochrone.service.run import run_service
from isochrone.service.trust.identity import load_identity
from ops.bench.stall_watch import BusyStall, StallWatch, peak_mib, resident_mib
from router.app import open_router
from router.config import RouterConfig

BUSY_MS: Final = 15.0


class RealRouterFigures(msgspec.Struct):
    """Figures that the router's process observed: its memory, and its longest stalls."""

    keys: int = 0
    routes: int = 0
    memory_mib: float = 0.0
    peak_mib: float = 0.0
    first_table_stall_ms: float = 0.0
    first_table_cpu_ms: float = 0.0
    later_stalls_ms: list[float] = []
    """The longest stall of each second after the first table."""
    later_cpu_ms: list[float] = []
    """The most CPU time in one stall of each of these seconds."""
    busiest: list[tuple[float, BusyStall]] = []
    """The stalls of more than BUSY_MS of CPU time, and the second after the first table of each."""


async def serve(folder: Path, port: int, figures: Path, urls: tuple[str, ...]) -> int:
    """Run the router until it is stopped."""
    identity = load_identity(folder)
    assert identity is not None
    config = RouterConfig(
        state_folder=folder, schedulers=urls, host="127.0.0.1", port=port, processes=1
    )
    watch, seen = StallWatch(), RealRouterFigures()
    async with open_router(config, identity) as app:
        watching = asyncio.create_task(watch.run())
        stopping = asyncio.create_task(app.stopping.wait())
        while app.fleet.directory.table is None:  # noqa: ASYNC110 - no hook needed
            await asyncio.sleep(0.05)
        seen.first_table_stall_ms, seen.first_table_cpu_ms = (
            watch.take_ms(),
            watch.take_busiest().cpu_ms,
        )
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=1.0)
            seen.later_stalls_ms.append(watch.take_ms())
            busiest = watch.take_busiest()
            seen.later_cpu_ms.append(busiest.cpu_ms)
            if busiest.cpu_ms > BUSY_MS:
                seen.busiest.append((len(seen.later_cpu_ms), busiest))
            table = app.fleet.directory.table
            seen.keys, seen.routes = len(table.keys), len(table.routes)
            seen.memory_mib, seen.peak_mib = resident_mib(), peak_mib()
            # Written now and then, so that a kill loses nothing.
            await asyncio.to_thread(write_atomic, figures, msgspec.json.encode(seen))
        watching.cancel()
    return 0


async def run(stopping: asyncio.Event) -> int:
    """Run the router in the background until the process is stopped."""
    folder, port, figures, *urls = sys.argv[1:]
    serving = asyncio.create_task(serve(Path(folder), int(port), Path(figures), tuple(urls)))
    await stopping.wait()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return 0


if __name__ == "__main__":
    setup_logs("router", "INFO")
    run_service(run)
