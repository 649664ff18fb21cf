"""The demo's steps: one chat through each city, then demand that adds a replica."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from rich.table import Table

from isochrone.cli.chat import ChatFailed, ChatResult, chat
from isochrone.wire.ids import PopId
from ops.fleet import layout, model
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES, City, round_trip_ms

QUESTION: Final = "In one sentence: why is the sky blue?"
DEMAND_CHATS: Final = 30
DEMAND_CONCURRENCY: Final = 3
SETTLE_TIMEOUT_S: Final = 60.0

Say = Callable[[str], None]


async def chat_in(fleet: LocalFleet, city: City, max_tokens: int = 32) -> ChatResult:
    """Send one streamed chat through a city's router."""
    body: dict[str, Any] = {
        "model": model.NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    return await chat(
        endpoint=layout.endpoint(city), key=fleet.key, body=body, on_text=lambda text: None
    )


async def chat_everywhere(fleet: LocalFleet) -> list[tuple[City, ChatResult]]:
    """Send one chat through each city's router, one after another."""
    return [(city, await chat_in(fleet, city)) for city in CITIES]


def table_of(title: str, answers: list[tuple[City, ChatResult]]) -> Table:
    """Return a table of where each city's chat was answered, why there, and how fast."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("USER IN", "POP", "NODE", "TTFT", "TOKENS/S", "CACHED", "WHY"):
        table.add_column(column, justify="right" if column in ("TTFT", "TOKENS/S") else "left")
    for city, result in answers:
        table.add_row(
            city.pop,
            result.pop,
            result.node,
            f"{result.ttft_ms:.0f} ms",
            f"{result.tokens_per_s:.1f}",
            f"{result.cached_tokens}/{result.prompt_tokens}",
            result.why,
        )
    return table


async def grow_demand(fleet: LocalFleet, city: City, say: Say) -> None:
    """Send chats in one city until the scheduler has started a replica there."""
    say(f"demand grows in {city.name}: {DEMAND_CHATS} short chats, {DEMAND_CONCURRENCY} at a time")
    for _ in range(DEMAND_CHATS // DEMAND_CONCURRENCY):
        await chat_concurrently(fleet, city)
    await fleet.wait_warm(city)
    await fleet.wait_routed()


async def chat_concurrently(fleet: LocalFleet, city: City) -> None:
    """Send DEMAND_CONCURRENCY short chats through a city's router at once.

    A busy machine may refuse some of them. They are demand like those that it answers.
    """

    async def short_chat() -> None:
        with suppress(ChatFailed):
            await chat_in(fleet, city, max_tokens=4)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(DEMAND_CONCURRENCY):
            tasks.create_task(short_chat())


async def chat_until(
    fleet: LocalFleet, expected: Mapping[PopId, PopId]
) -> tuple[list[tuple[City, ChatResult]], str]:
    """Chat in every city until each is served from the expected PoP; return what is wrong, or "".

    A router prefers a far replica while it expects a lower TTFT there: until its next probe of a
    new node, or after a busy machine made the near replica slow. More concurrent chats change that.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        answers = await chat_everywhere(fleet)
        problem = problem_of(answers, expected)
        if not problem or time.monotonic() > deadline:
            return answers, problem
        for city, result in answers:
            if expected.get(city.pop, result.pop) != result.pop:
                await chat_concurrently(fleet, city)
        await asyncio.sleep(1.0)


def problem_of(answers: list[tuple[City, ChatResult]], expected: Mapping[PopId, PopId]) -> str:
    """Return what differs from the expected PoPs, or ""."""
    for city, result in answers:
        if result.output_tokens < 2 or not result.text.strip():
            return f"the user in {city.pop} got no text"
        expected_pop = expected.get(city.pop)
        if expected_pop is not None and result.pop != expected_pop:
            return f"the user in {city.pop} was served from {result.pop}, expected {expected_pop}"
        round_trip = round_trip_ms(city.pop, result.pop)
        if result.ttft_ms < round_trip:
            return (
                f"the user in {city.pop} saw a TTFT of {result.ttft_ms:.0f} ms, less than the "
                f"round trip of {round_trip:.0f} ms"
            )
    return ""
