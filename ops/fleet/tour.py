"""What the demo shows: one chat through each city, then demand that moves the model."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rich.table import Table

from isochrone.cli.chat import ChatResult, chat
from isochrone.wire.ids import PopId
from ops.fleet import layout, model
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES, City, round_trip_ms

QUESTION: Final = "In one sentence: why is the sky blue?"
CROWD: Final = 30
CROWD_AT_ONCE: Final = 3
SETTLE_TIMEOUT_S: Final = 60.0

Say = Callable[[str], None]


async def ask_in(fleet: LocalFleet, city: City, max_tokens: int = 32) -> ChatResult:
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


async def ask_everywhere(fleet: LocalFleet) -> list[tuple[City, ChatResult]]:
    """Send one chat through each city's router, one after another."""
    return [(city, await ask_in(fleet, city)) for city in CITIES]


def table_of(title: str, answers: list[tuple[City, ChatResult]]) -> Table:
    """Show where each city's chat was answered, why there, and how fast."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("USER IN", "POP", "NODE", "TTFT", "TOKENS/S", "CACHED", "WHY"):
        table.add_column(column, justify="right" if column in ("TTFT", "TOKENS/S") else "left")
    for city, served in answers:
        table.add_row(
            city.pop,
            served.pop,
            served.node,
            f"{served.ttft_ms:.0f} ms",
            f"{served.tokens_per_s:.1f}",
            f"{served.cached_tokens}/{served.prompt_tokens}",
            served.why,
        )
    return table


async def grow_demand(fleet: LocalFleet, city: City, say: Say) -> None:
    """Ask in one city until the scheduler brings a replica up there."""
    say(f"demand grows in {city.name}: {CROWD} short chats, {CROWD_AT_ONCE} at a time")
    for _ in range(CROWD // CROWD_AT_ONCE):
        await ask_at_once(fleet, city)
    await fleet.wait_warm(city)
    await fleet.wait_routed()


async def ask_at_once(fleet: LocalFleet, city: City) -> None:
    """Send several short chats through a city's router together."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CROWD_AT_ONCE):
            tasks.create_task(ask_in(fleet, city, max_tokens=4))


async def ask_until(
    fleet: LocalFleet, expected: Mapping[PopId, PopId]
) -> tuple[list[tuple[City, ChatResult]], str]:
    """Ask in every city until each is served from where it should be; return what is wrong else.

    A router asks far away for as long as that is sooner: until its next probe has found a new node,
    and where a busy machine made the near one look slow, until more is asked than one can answer.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        answers = await ask_everywhere(fleet)
        problem = problem_of(answers, expected)
        if not problem or time.monotonic() > deadline:
            return answers, problem
        for city, served in answers:
            if expected.get(city.pop, served.pop) != served.pop:
                await ask_at_once(fleet, city)
        await asyncio.sleep(1.0)


def problem_of(answers: list[tuple[City, ChatResult]], expected: Mapping[PopId, PopId]) -> str:
    """Say in words what is not as it should be; "" if all is."""
    for city, served in answers:
        if served.output_tokens < 2 or not served.text.strip():
            return f"the user in {city.pop} got no text"
        wanted = expected.get(city.pop)
        if wanted is not None and served.pop != wanted:
            return f"the user in {city.pop} was served from {served.pop}, expected {wanted}"
        floor = round_trip_ms(city.pop, served.pop)
        if served.ttft_ms < floor:
            return f"the user in {city.pop} saw {served.ttft_ms:.0f} ms, under the {floor:.0f} ms"
    return ""
