"""Measures how fast a vendor engine reads a prompt, for the limit of its steps."""

import asyncio
import time
from collections.abc import Callable

import aiohttp
import msgspec

from nodeagent.config import CANARY_TIMEOUT_S
from nodeagent.decide.replicas.step_limit import step_limit_s, step_tokens_max
from nodeagent.host.engines.canary import (
    BAD_REQUEST,
    CANARIES,
    OK,
    PROMPT_CANARY,
    Canary,
    long_canary,
    tokens_read,
)
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.engine_record import keep_record
from nodeagent.host.engines.open_session import read_answer


async def measure_step(
    engine: EngineProcess,
    kind: str,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Note how long a step may take, if the engine generates text and does not count layers.

    An engine that is adopted later has the same limit: it is part of the record.
    """
    spec = engine.record.spec
    step_tokens = step_tokens_max(spec.engine)
    canary = CANARIES.get(spec.kind or kind, CANARIES["chat"])
    if not step_tokens or canary.answer != "choices":
        return
    speed = await _tokens_per_s(engine, canary, clock)
    if speed is None:  # a model without a chat template
        speed = await _tokens_per_s(engine, PROMPT_CANARY, clock)
    limit_s = step_limit_s(step_tokens, speed or 0.0)
    engine.record = msgspec.structs.replace(engine.record, step_limit_s=limit_s)
    await keep_record(engine.log.parent, engine.record)


async def _tokens_per_s(
    engine: EngineProcess, canary: Canary, clock: Callable[[], float]
) -> float | None:
    """Return the speed at which the engine read a long prompt, which it has not cached.

    Returns None if it refuses such a prompt, and 0 if there is no answer or the answer does not say
    how long the prompt was.
    """
    record = engine.record
    name = record.command.model_name or record.spec.name
    body = {"model": name, **long_canary(canary, f"{record.pid}-{record.started}").body}
    if engine.handshake is not None:
        body |= engine.handshake.canary_fields
    began_s = clock()
    try:
        async with (
            asyncio.timeout(CANARY_TIMEOUT_S),
            engine.http.post(canary.path, json=body) as response,
        ):
            answer = await read_answer(response)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return 0.0
    if response.status == BAD_REQUEST:
        return None
    took_s = clock() - began_s
    return tokens_read(answer) / took_s if response.status == OK and took_s > 0 else 0.0
