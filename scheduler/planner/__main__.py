"""`python -m scheduler.planner`: the planner's process. A scheduler starts it, asks by its stdin.

That ends when the scheduler does, however it ended; and so does the planner.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Final

import msgspec

from isochrone.service.logs import setup_logs
from scheduler.planner.messages import (
    PlannerReply,
    PlannerRequest,
    PlannerSettings,
    frame,
    read_frame,
)
from scheduler.planner.server import PlannerServer
from scheduler.store.pool import UNAVAILABLE, open_pool

log = logging.getLogger(__name__)

CONNECTIONS: Final = 4
NICE: Final = 5
COLLECTED_AFTER: Final = (50_000, 20, 50)
"""A plan makes and drops millions of objects: by Python's own thresholds (700, 10, 10) many outlive
several collections, and each costs more than the one before."""


async def answer_all() -> int:
    """Answer for as long as anybody may ask; return the exit code."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    told, _ = await loop.connect_write_pipe(asyncio.Protocol, sys.stdout)
    settings = msgspec.msgpack.decode(await read_frame(reader), type=PlannerSettings)
    setup_logs("planner", settings.log_level)
    try:
        pool = await open_pool(settings.database_url, size_max=CONNECTIONS)
    except UNAVAILABLE as error:
        log.warning("cannot reach the database", extra={"fields": {"reason": str(error)[:200]}})
        return 1
    desk = PlannerServer(pool, settings.liveness)

    async def answer(asked: PlannerRequest) -> None:
        told.write(frame(await _told(desk, asked)))

    answering: set[asyncio.Task[None]] = set()
    with suppress(asyncio.IncompleteReadError):
        while True:
            asked = msgspec.msgpack.decode(await read_frame(reader), type=PlannerRequest)
            task = asyncio.create_task(answer(asked))
            answering.add(task)
            task.add_done_callback(answering.discard)
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)
    pool.terminate()
    return 0


async def _told(desk: PlannerServer, asked: PlannerRequest) -> PlannerReply:
    try:
        answer = await desk.answer(asked)
    except UNAVAILABLE as error:
        return PlannerReply(
            asked.number, failure=f"the database is away: {error or type(error).__name__}"
        )
    except Exception as error:
        log.exception("no answer", extra={"fields": {"asked": type(asked.question).__name__}})
        return PlannerReply(asked.number, failure=f"{type(error).__name__}: {error}"[:300])
    return PlannerReply(asked.number, msgspec.Raw(msgspec.msgpack.encode(answer)))


def main() -> None:
    """Run it; those who are talked with come first for the processor."""
    gc.set_threshold(*COLLECTED_AFTER)
    os.nice(NICE)
    # It ends when its scheduler does, which may still have something to ask.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(asyncio.run(answer_all()))


if __name__ == "__main__":
    main()
