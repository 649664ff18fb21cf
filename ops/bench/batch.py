"""Interactive time to first token with and without a backlog of batch items, over mock engines.

    python -m ops.bench.batch [--rounds 3] [--requests 150]

Rounds without and with a backlog take turns on one fleet of two cities, so that a machine that is
busy with something else disturbs both alike. Only the ratio of two rounds of one run counts.

Printed on 2 shared cores, Python 3.11, `--rounds 2 --requests 120`, while other work ran:

                       p50 ms   p99 ms   items/s
    no backlog           26.6    522.4       0.0
    with a backlog       41.1    254.4      42.8

The clients, the routers, the nodes and the mock engines share these cores, so the median rises with
every item; the p99 is the machine's. The result does not hold for GPUs: measure again where engines
have processors of their own.
"""

import argparse
import asyncio
import json
import time
from statistics import median, quantiles
from typing import Final

import aiohttp
import openai

from tests.system.harness import Fleet, a_fleet, until

RATE_PER_S: Final = 20.0
TOKENS: Final = 8
BACKLOG_ITEMS: Final = 20_000


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


async def begin_backlog(client: openai.AsyncOpenAI) -> str:
    """Begin a batch that outlasts a round; return its id."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "mock",
                "max_tokens": TOKENS,
                "messages": [{"role": "user", "content": f"item {number}"}],
            },
        }
        for number in range(BACKLOG_ITEMS)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    await until("items are answered", lambda: answered(client, batch.id))
    return batch.id


async def answered(client: openai.AsyncOpenAI, batch_id: str) -> int:
    """Return how many items of a batch are answered."""
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts.completed if counts is not None else 0


def row(name: str, times_ms: list[float], items_per_s: float) -> str:
    """Return one line of the table."""
    p99 = quantiles(times_ms, n=100)[98]
    return f"{name:<16} {median(times_ms):>8.1f} {p99:>8.1f} {items_per_s:>9.1f}"


async def run(rounds: int, requests: int) -> None:
    """Measure, and print the table."""
    async with a_fleet(comes_up=False) as fleet:
        fleet.settings["scheduler-a"] = {"batch_folder": str(fleet.folder / "batches")}
        await fleet.up()
        await fleet.deploy(replicas=2)
        client = openai.AsyncOpenAI(base_url=f"{fleet.endpoint('ams')}/v1", api_key=fleet.key)
        async with client:
            await interactive_round(fleet, requests)
            without: list[float] = []
            beside: list[float] = []
            rates: list[float] = []
            for _ in range(rounds):
                without += await interactive_round(fleet, requests)
                batch_id = await begin_backlog(client)
                before, began_s = await answered(client, batch_id), time.perf_counter()
                beside += await interactive_round(fleet, requests)
                after = await answered(client, batch_id)
                rates.append((after - before) / (time.perf_counter() - began_s))
                await client.batches.cancel(batch_id)
                await asyncio.sleep(3)
    print(f"{'':<16} {'p50 ms':>8} {'p99 ms':>8} {'items/s':>9}")
    print(row("no backlog", without, 0.0))
    print(row("with a backlog", beside, median(rates)))


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=150)
    given = parser.parse_args()
    asyncio.run(run(given.rounds, given.requests))


if __name__ == "__main__":
    main()
