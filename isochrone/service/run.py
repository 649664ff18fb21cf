"""Runs a service: its event loop, its exit code and its signals."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from isochrone.service.config import ConfigError
from isochrone.service.network.name_lookup import ServiceLoop
from isochrone.service.systemd import notify

log = logging.getLogger(__name__)

EXIT_CONFIG_ERROR = 2
EXIT_CANCELLED = 130


def run_service(main: Callable[[asyncio.Event], Awaitable[int]]) -> NoReturn:
    """Run `main(stopping)` and exit with its code. The first SIGTERM or SIGINT sets `stopping`.

    A second signal cancels `main`: drains are cut short.
    """
    # Imported objects live for ever: the garbage collector need not walk them.
    gc.collect()
    gc.freeze()
    # Python's next full collection waits for a quarter as many new objects as the last one left.
    gc.collect()
    try:
        code = uvloop.run(_run(main), loop_factory=ServiceLoop)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        code = EXIT_CONFIG_ERROR
    except asyncio.CancelledError:
        code = EXIT_CANCELLED
    raise SystemExit(code)


async def _run(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def on_signal(name: str) -> None:
        if stopping.is_set():
            log.warning("stopping at once", extra={"fields": {"signal": name}})
            task.cancel()
            return
        log.info("stopping", extra={"fields": {"signal": name}})
        notify("STOPPING=1")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    return await main(stopping)
