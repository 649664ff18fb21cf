"""Starts an engine: from the start of its process to its first token."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from nodeagent.host.engines.engine_log import TRIM_INTERVAL_S, trim_log
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.engine_record import keep_record
from nodeagent.host.engines.step_probe import measure_step

POLL_INTERVAL_S: Final = 0.1
GUARD_INTERVAL_S: Final = 1.0
READY_AGAIN_S: Final = 60.0
"""The time in which an adopted engine answers that was ready before: it need not load its model. A
busy machine may delay it. One that has hung answers no more, and its replica starts again."""

FIRST_TOKEN_TRIES: Final = 3
ASLEEP_TRIES: Final = 5


async def wait_ready(
    engine: EngineProcess,
    clock: Callable[[], float],
    load_timeout_s: float,
    memory_problem: Callable[[], Awaitable[str]],
) -> str:
    """Wait until the engine has loaded its model; return why it did not, or ""."""
    started_s = trimmed_s = guarded_s = clock()
    record = engine.record
    # One that may sleep could be waking.
    is_loaded = record.was_ready and record.spec.overcommit <= 1
    timeout_s = min(READY_AGAIN_S, load_timeout_s) if is_loaded else load_timeout_s
    while not await engine.is_ready():
        now_s = clock()
        if engine.exited.is_set():
            return f"{engine.exit_reason} while loading"
        if engine.problem:
            return engine.problem
        if now_s - started_s > timeout_s:
            if is_loaded:
                return f"the engine was ready, and has not answered its agent for {timeout_s:g} s"
            return (
                f"the engine was not ready after {timeout_s:g} s; if it only needs longer, raise"
                " load_timeout_s of the node"
            )
        if now_s - trimmed_s > TRIM_INTERVAL_S:
            trimmed_s = now_s
            await asyncio.to_thread(trim_log, engine.log)
        if now_s - guarded_s > GUARD_INTERVAL_S:
            guarded_s = now_s
            if problem := await memory_problem():
                return problem
        await asyncio.sleep(POLL_INTERVAL_S)
    return ""


async def note_ready(engine: EngineProcess) -> None:
    """Note on disk that the engine has loaded its model, for the next agent."""
    if not engine.record.was_ready:
        engine.record = msgspec.structs.replace(engine.record, was_ready=True)
        await keep_record(engine.log.parent, engine.record)


async def find_asleep(engine: EngineProcess) -> bool | None:
    """Return whether an adopted engine sleeps; None if it does not say so in several tries.

    Requests to one that sleeps would hang.
    """
    for _ in range(ASLEEP_TRIES):
        is_asleep = await engine.is_asleep()
        if is_asleep is not None or engine.exited.is_set():
            return is_asleep
        await asyncio.sleep(POLL_INTERVAL_S)
    return None


async def warm_up(engine: EngineProcess) -> str:
    """Request one token before the engine gets traffic, because its first takes longest.

    Then measures how long its steps may take. Returns why the engine cannot be used, or "". An
    error that it answers, unless it is one of its own (500), is left to the watch, which sends
    canaries of its own and judges them.
    """
    stats = await engine.stats()
    # The statistics may be slow on a busy machine. Then the request is one for a chat model, unless
    # the assignment names another kind.
    kind = stats.kind if stats is not None else ""
    for _ in range(FIRST_TOKEN_TRIES):
        if await engine.canary(kind):
            await measure_step(engine, kind)
            return ""
        if not engine.problem:
            return ""
        if engine.exited.is_set():
            return f"{engine.exit_reason} at its first request"
    return f"the engine is ready and gives no answer: {engine.problem}"
