"""`python -m scheduler.planner`: the planner process, which answers requests from stdin.

The scheduler starts it. Stdin closes when the scheduler ends, for whatever reason, and then the
planner ends too.
"""

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Final

import msgspec

from isochrone.service.failure_log import error_text
from isochrone.service.logs import setup_logs
from scheduler.planner.garbage import GarbageBetweenAnswers
from scheduler.planner.messages import (
    PlannerCall,
    PlannerReply,
    PlannerSettings,
    frame,
    read_frame,
)
from scheduler.planner.server import PlannerServer
from scheduler.store.pool import UNAVAILABLE, open_pool

log = logging.getLogger(__name__)

CONNECTIONS: Final = 4
NICE: Final = 5


async def serve() -> int:
    """Answer requests until stdin closes; return the exit code."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    writer, _ = await loop.connect_write_pipe(asyncio.Protocol, sys.stdout)
    settings = msgspec.msgpack.decode(await read_frame(reader), type=PlannerSettings)
    setup_logs("planner", settings.log_level)
    try:
        pool = await open_pool(settings.database_url, size_max=CONNECTIONS)
    except UNAVAILABLE as error:
        log.warning(
            "cannot reach the database", extra={"fields": {"reason": error_text(error)[:200]}}
        )
        return 1
    server = PlannerServer(pool, settings.liveness)
    garbage = GarbageBetweenAnswers()

    async def answer(call: PlannerCall) -> None:
        writer.write(frame(await _reply_to(server, call)))
        garbage.collect()

    answering: set[asyncio.Task[None]] = set()
    with suppress(asyncio.IncompleteReadError):
        while True:
            call = msgspec.msgpack.decode(await read_frame(reader), type=PlannerCall)
            task = asyncio.create_task(answer(call))
            answering.add(task)
            task.add_done_callback(answering.discard)
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)
    pool.terminate()
    return 0


async def _reply_to(server: PlannerServer, call: PlannerCall) -> PlannerReply:
    try:
        answer = await server.answer(call.request)
    except UNAVAILABLE as error:
        return PlannerReply(call.number, failure=f"cannot reach the database: {error_text(error)}")
    except Exception as error:
        # Whatever fails, the scheduler must get a reply, or it would wait for its timeout.
        fields = {"request": type(call.request).__name__}
        log.exception("cannot answer a request", extra={"fields": fields})
        return PlannerReply(call.number, failure=f"{type(error).__name__}: {error}"[:300])
    return PlannerReply(call.number, msgspec.Raw(msgspec.msgpack.encode(answer)))


def main() -> None:
    """Run the planner at a lower CPU priority than the processes that hold connections."""
    os.nice(NICE)
    # It ends with its scheduler, which may still send requests while it shuts down.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(asyncio.run(serve()))


if __name__ == "__main__":
    main()
