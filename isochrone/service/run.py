"""Running a service: the event loop, and what signals mean."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from isochrone.service.config import ConfigError
from isochrone.service.systemd import notify

log = logging.getLogger(__name__)


def run_service(main: Callable[[asyncio.Event], Awaitable[int]]) -> NoReturn:
    """Run `main(stopping)` to its exit code. The first SIGTERM or SIGINT sets `stopping`.

    A second signal cancels `main`: the operator is out of patience, and drains end there.
    """
    # What was imported is never garbage: else the collector walks all of it now and then, and
    # nobody is served meanwhile.
    gc.collect()
    gc.freeze()
    try:
        code = uvloop.run(_run(main))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        code = 2
    except asyncio.CancelledError:
        code = 130
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
