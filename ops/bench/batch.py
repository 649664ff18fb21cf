"""Interactive time to first token with and without a backlog of batch items, over mock engines.

    python -m ops.bench.batch [--rounds 4] [--requests 120] [--write]

`--write` writes ops/bench/batch.md.

Rounds without and with a backlog take turns on one fleet of two cities, with the same interactive
load, so that a machine that is busy with something else disturbs both alike. An engine runs SLOTS
requests at once, each at the same pace however many run, as a GPU that decodes from memory does:
its capacity is known, and the processors of this machine are not it.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import aiohttp
import openai

from tests.system.harness import Fleet, a_fleet, until

RATE_PER_S: Final = 8.0
TOKENS: Final = 8
TTFT_MS: Final = 200
ITL_MS: Final = 100
REPLICAS: Final = 2
SLOTS: Final = 16
SERVICE_S: Final = (TTFT_MS + ITL_MS * (TOKENS - 1)) / 1000
IDLE_PER_S: Final = REPLICAS * SLOTS / SERVICE_S - RATE_PER_S
"""The items per second that engines could answer beside the interactive load, and no more."""
BACKLOG_ITEMS: Final = 10_000
STEADY_ITEMS: Final = 4 * REPLICAS * SLOTS
"""A round begins when the backlog has come to its pace."""
PERCENTILES: Final = (50, 90, 99)


async def ttft_ms(fleet: Fleet, http: aiohttp.ClientSession, number: int) -> float:
    """Return the time to the first token of one interactive stream, in ms."""
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": f"question {number}"}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    began_s = time.perf_counter()
    async with http.post(
        f"{fleet.endpoint('ams')}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {fleet.key}"},
    ) as response:
        response.raise_for_status()
        first_ms = 0.0
        async for line in response.content:
            if not first_ms and b'"content":"t' in line:
                first_ms = 1000 * (time.perf_counter() - began_s)
    return first_ms


async def interactive_round(fleet: Fleet, requests: int) -> list[float]:
    """Send `requests` streams at a fixed rate; return their times to the first token."""
    async with aiohttp.ClientSession() as http:
        streams = []
        for number in range(requests):
            streams.append(asyncio.create_task(ttft_ms(fleet, http, number)))
            await asyncio.sleep(1 / RATE_PER_S)
        return await asyncio.gather(*streams)


def mock_item(number: int) -> dict[str, Any]:
    """Return the body of one item for a mock engine."""
    messages = [{"role": "user", "content": f"item {number}"}]
    return {"model": "mock", "max_tokens": TOKENS, "messages": messages}


async def begin_backlog(
    client: openai.AsyncOpenAI, item: Callable[[int], dict[str, Any]], *, steady_items: int
) -> str:
    """Begin a batch that outlasts a round; return its id once it has come to its pace."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": item(number),
        }
        for number in range(BACKLOG_ITEMS)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    async def is_steady() -> bool:
        return await answered(client, batch.id) >= steady_items

    await until("items are answered", is_steady)
    return batch.id


async def end_backlog(client: openai.AsyncOpenAI, batch_id: str) -> None:
    """Cancel a batch, and wait until nothing of it runs any longer."""
    await client.batches.cancel(batch_id)

    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch_id)).status == "cancelled"

    await until("the batch has ended", has_ended)


async def answered(client: openai.AsyncOpenAI, batch_id: str) -> int:
    """Return how many items of a batch are answered."""
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts.completed if counts is not None else 0


def percentiles(times_ms: list[float]) -> list[float]:
    """Return the PERCENTILES of times."""
    cuts = quantiles(times_ms, n=100)
    return [cuts[percentile - 1] for percentile in PERCENTILES]


def row(name: str, cells: list[str]) -> str:
    """Return one line of the table."""
    return f"{name:<28}" + "".join(f"{cell:>9}" for cell in cells)


def table(without: list[list[float]], beside: list[list[float]], rates: list[float]) -> str:
    """Return the results of rounds without and with a backlog, and how much of it was answered.

    The rounds without one, compared with each other, show what the machine alone changes.
    """
    alone = percentiles([time_ms for times in without for time_ms in times])
    loaded = percentiles([time_ms for times in beside for time_ms in times])
    halves = [
        percentiles([time_ms for times in without[part::2] for time_ms in times]) for part in (0, 1)
    ]
    items_per_s = median(rates)
    return "\n".join(
        [
            row("", [f"p{percentile} ms" for percentile in PERCENTILES]),
            row("no backlog", [f"{value:.1f}" for value in alone]),
            row("with a backlog", [f"{value:.1f}" for value in loaded]),
            row("ratio", [f"{b / a:.3f}" for a, b in zip(alone, loaded, strict=True)]),
            row(
                "no backlog, 2nd / 1st half",
                [f"{b / a:.3f}" for a, b in zip(*halves, strict=True)],
            ),
            f"items per second {items_per_s:.1f} of {IDLE_PER_S:.1f} that were idle:"
            f" {100 * items_per_s / IDLE_PER_S:.0f} %",
        ]
    )


async def run(rounds: int, requests: int) -> str:
    """Measure, and return the table."""
    async with a_fleet(comes_up=False) as fleet:
        fleet.settings["scheduler-a"] = {"batch_folder": str(fleet.folder / "batches")}
        await fleet.up()
        options = {"ttft_ms": str(TTFT_MS), "itl_ms": str(ITL_MS), "sequences": str(SLOTS)}
        await fleet.deploy(replicas=REPLICAS, options=options)
        client = openai.AsyncOpenAI(base_url=f"{fleet.endpoint('ams')}/v1", api_key=fleet.key)
        async with client:
            await interactive_round(fleet, requests)
            without: list[list[float]] = []
            beside: list[list[float]] = []
            rates: list[float] = []
            for _ in range(rounds):
                without.append(await interactive_round(fleet, requests))
                batch_id = await begin_backlog(client, mock_item, steady_items=STEADY_ITEMS)
                before, began_s = await answered(client, batch_id), time.perf_counter()
                beside.append(await interactive_round(fleet, requests))
                after = await answered(client, batch_id)
                rates.append((after - before) / (time.perf_counter() - began_s))
                await end_backlog(client, batch_id)
    return table(without, beside, rates)


def measure_and_print(
    description: str, run: Callable[[int, int], Awaitable[str]], *, rounds: int, requests: int
) -> None:
    """Read how many rounds and requests to measure, and print the table and the machine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--requests", type=int, default=requests)
    given = parser.parse_args()

    async def measured() -> str:
        return await run(given.rounds, given.requests)

    print(asyncio.run(measured()))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"\n{os.cpu_count()} processors, Python {platform.python_version()},"
        f" load average at the end {load}"
    )


def report(printed: str, rounds: int, requests: int, seconds: float) -> str:
    """Return the page with the table: what was measured, and on what machine."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    arguments = f"--rounds {rounds} --requests {requests} --write"
    lines = (
        "# Batches beside interactive requests",
        "",
        f"`python -m ops.bench.batch {arguments}`",
        "",
        f"{rounds} rounds without and {rounds} with a backlog of {BACKLOG_ITEMS:,} items take"
        " turns on one fleet of two cities.",
        f"A round sends {requests} streams, {RATE_PER_S:g} a second. {REPLICAS} mock engines run"
        f" {SLOTS} requests each: the first token",
        f"after {TTFT_MS} ms, and {ITL_MS} ms for each further one, {TOKENS} tokens in all. They"
        " serve first come, first served, as most",
        "engines do, so the node ends the item that began last if a stream finds no free sequence",
        "(`nodeagent/decide/requests/preemption.py`). Idle is what these engines could answer"
        " beside the streams; items",
        "that end in vain are not counted.",
        "",
        "Goals: a ratio of at most 1.05 at p99, and at least 90 % of the idle capacity.",
        '"no backlog, 2nd / 1st half" compares rounds without a backlog with each other: it shows'
        " what the machine alone",
        "changes.",
        "",
        "```",
        printed,
        "```",
        "",
        f"{os.cpu_count()} processors, Python {platform.python_version()}, {seconds / 60:.0f}"
        f" minutes; load average at the end {load}",
        "(of 1, 5 and 15 minutes).",
        "",
    )
    return "\n".join(lines)


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--write", action="store_true", help="write the table to batch.md")
    given = parser.parse_args()
    began_s = time.monotonic()
    printed = asyncio.run(run(given.rounds, given.requests))
    print(printed)
    if given.write:
        seconds = time.monotonic() - began_s
        page = report(printed, given.rounds, given.requests, seconds)
        Path(__file__).with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
