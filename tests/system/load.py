"""A load of numbered streams that checks every token of every answer, and an operator's changes.

Two tenants send them. Each answer has numbers of its own, so that no answer or token can come to
another request unnoticed.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tests.system.harness import Fleet, until

PROMPT = "say-all-numbers-in-order"
"""A text that is nowhere in the code: a log that contains it contains a prompt."""


NUMBERS = itertools.count(1)
ANSWER_TOKENS_MAX = 10_000
"""The numbers from one answer's first token to the next one's."""

OPERATOR_PAUSE_S = 1.0
OPERATOR_TIMEOUT_S = 3.0


@dataclass
class Ended:
    """How one request ended: `complete`, `error-event`, `refused`, `reset` or `broken`."""

    how: str
    tokens: int = 0
    request_id: str = ""
    detail: str = ""
    node: str = ""
    """The node that answered first."""


@dataclass
class Load:
    """The ends of all requests of a load."""

    ended: list[Ended] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    """The numbers of the requests that have begun and not ended."""
    keys: dict[str, str] = field(default_factory=dict)
    """The keys that an operator created meanwhile, by id: those that were acknowledged."""

    def count(self, how: str) -> int:
        return sum(ended.how == how for ended in self.ended)

    def failures(self) -> list[Ended]:
        return [ended for ended in self.ended if ended.how != "complete"]


async def one_stream(
    fleet: Fleet, http: aiohttp.ClientSession, pop: str, tokens: int, key: str = "", **extra: Any
) -> Ended:
    """Stream one answer of numbered tokens and check that none is lost, repeated or reordered.

    It has numbers of its own, unless `extra` has a field `mock`: its faults name tokens.
    """
    first = ANSWER_TOKENS_MAX * next(NUMBERS) if "mock" not in extra else 0
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "stream": True,
        "mock": {"first_token": first},
        **extra,
    }
    seen = 0
    is_done = False
    try:
        async with http.post(
            f"{fleet.endpoint(pop)}/v1/chat/completions",
            data=msgspec.json.encode(body),
            headers={
                "authorization": f"Bearer {key or fleet.key}",
                "content-type": "application/json",
            },
        ) as response:
            request_id = response.headers.get("x-request-id", "")
            node = response.headers.get("x-isochrone-node", "")
            if response.status != 200:
                return Ended("refused", 0, request_id, (await response.text())[:200])
            async for line in response.content:
                if line.startswith(b":"):
                    continue
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    is_done = True
                elif data:
                    frame = msgspec.json.decode(data)
                    if "error" in frame:
                        return Ended("error-event", seen, request_id, str(frame["error"]))
                    for choice in frame["choices"]:
                        for word in (choice["delta"].get("content") or "").split():
                            number = first + seen
                            assert word == f"t{number}", f"got {word}, expected t{number}"
                            seen += 1
    except (aiohttp.ClientError, OSError) as error:
        return Ended("reset", seen, "", type(error).__name__)
    complete = is_done and seen == tokens
    return Ended("complete" if complete else "broken", seen, request_id, f"{seen}/{tokens}", node)


@asynccontextmanager
async def under_load(
    fleet: Fleet, pops: list[str], *, streams: int = 8, tokens: int = 30, creates_keys: bool = True
) -> AsyncIterator[Load]:
    """Run `streams` numbered streams at once through `pops` during the block, then finish them.

    They belong to two tenants in turn. With `creates_keys` an operator creates one every second.
    """
    load = Load()
    stopping = asyncio.Event()

    async def one_after_another(pop: str, key: str) -> None:
        while not stopping.is_set():
            number = next(NUMBERS)
            load.running.add(number)
            ended = await one_stream(fleet, http, pop, tokens, key)
            load.running.remove(number)
            load.ended.append(ended)
            if ended.how != "complete":
                # A refused client pauses, which also limits the length of the list.
                await asyncio.sleep(0.05)

    timeout = aiohttp.ClientTimeout(total=60.0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for index in range(streams):
            key = (fleet.key, fleet.other_key)[index // len(pops) % 2]
            tasks.create_task(one_after_another(pops[index % len(pops)], key))
        if creates_keys:
            tasks.create_task(_create_keys(fleet, http, load, stopping))
        try:
            yield load
        finally:
            stopping.set()


async def _create_keys(
    fleet: Fleet, http: aiohttp.ClientSession, load: Load, stopping: asyncio.Event
) -> None:
    """Create keys, and remember those that a scheduler has acknowledged."""
    while not stopping.is_set():
        for scheduler in fleet.schedulers_started():
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with http.post(
                    f"{fleet.admin_url(scheduler)}/v1/keys",
                    json={"tenant_id": "operator"},
                    headers={"authorization": f"Bearer {fleet.token}"},
                    timeout=aiohttp.ClientTimeout(total=OPERATOR_TIMEOUT_S),
                ) as answer:
                    if answer.status == 201:
                        made = await answer.json()
                        load.keys[made["key_id"]] = made["key"]
                        break
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), OPERATOR_PAUSE_S)


async def wait_ended(load: Load, more: int, timeout_s: float = 30.0) -> None:
    """Wait until `more` further requests are complete."""
    target = load.count("complete") + more

    async def have_ended() -> bool:
        return load.count("complete") >= target

    await until(f"{more} more requests are complete", have_ended, timeout_s)


async def wait_running_ended(load: Load, timeout_s: float = 30.0) -> None:
    """Wait until each request that runs now has ended.

    A router refuses a request with which two engines were lost: none may meet two kills.
    """
    running = set(load.running)

    async def have_ended() -> bool:
        return running.isdisjoint(load.running)

    await until("all requests that ran have ended", have_ended, timeout_s)
