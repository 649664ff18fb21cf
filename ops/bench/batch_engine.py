"""Time to first token of clients beside items of batches, in one embedded engine.

    python -m ops.bench.batch_engine [--rounds 3] [--requests 40]

The engine runs as an agent starts it, with the demo's model, without a router and a node. Rounds
take turns: clients alone, items alone, and both, with items of the clients' own tenant and of
another one. Clients' streams come at a fixed rate; so many items as the engine has sequences are
always in flight, with the lowest priority, as routers send them.

What clients leave idle is computed from processor time: of the items per second without clients,
the share of the processor time that clients alone do not take.
"""

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from isochrone.wire.http import headers
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers.driver import CHAT_PATH
from nodeagent.host.engines.engine_process import EngineProcess
from ops.bench.batch import PERCENTILES, measure_and_print, percentiles, row
from ops.bench.engines_alone import processor_s
from ops.fleet.model import FOLDER, PACKAGE
from tests.builders import GIB, a_spec
from tests.engines.real_engines import running_engine

RATE_PER_S: Final = 0.7
PROMPT_WORDS: Final = 150
CLIENT_TOKENS: Final = 8
ITEM_WORDS: Final = 60
ITEM_TOKENS: Final = 24
SEQUENCES: Final = 16
SETTLE_S: Final = 6.0
ITEMS_ALONE_S: Final = 10.0
WORDS: Final = ("red", "tree", "sky", "old", "house", "river", "small", "stone", "light", "wind")
CLIENT: Final = "client"
TENANTS: Final = {"the same tenant": CLIENT, "another tenant": "batches"}


class EngineClientsLoad:
    """Sends requests to one engine, and counts the items that it has answered."""

    def __init__(self, engine: EngineProcess, draw: random.Random) -> None:
        self._engine = engine
        self._draw = draw
        self.items = 0

    async def ttft_ms(self, words: int, tokens: int, priority: str, tenant: str) -> float:
        """Send one request to its end; return its time to the first token in ms.

        Requests of the lowest priority are not streamed, as routers send items.
        """
        text = " ".join(self._draw.choice(WORDS) for _ in range(words))
        body = {
            "model": "bench",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": priority != headers.PRIORITY_LOWEST,
        }
        sent = {
            "content-type": "application/json",
            headers.CACHE_SALT: tenant,
            headers.PRIORITY: priority,
        }
        began_s, first_ms = time.perf_counter(), 0.0
        data = msgspec.json.encode(body)
        async with self._engine.http.post(CHAT_PATH, data=data, headers=sent) as response:
            response.raise_for_status()
            async for line in response.content:
                if not first_ms and b'"content":"' in line and b'"content":""' not in line:
                    first_ms = 1000 * (time.perf_counter() - began_s)
        return first_ms

    async def clients(self, requests: int) -> list[float]:
        """Send clients' streams at a fixed rate; return their times to the first token in ms."""
        streams = []
        for _ in range(requests):
            stream = self.ttft_ms(PROMPT_WORDS, CLIENT_TOKENS, "50", CLIENT)
            streams.append(asyncio.create_task(stream))
            await asyncio.sleep(1 / RATE_PER_S)
        return await asyncio.gather(*streams)

    @asynccontextmanager
    async def backlog(self, tenant: str) -> AsyncIterator[None]:
        """Keep items of a tenant in flight during the block."""

        async def one_after_another() -> None:
            while True:
                await self.ttft_ms(ITEM_WORDS, ITEM_TOKENS, headers.PRIORITY_LOWEST, tenant)
                self.items += 1

        running = [asyncio.create_task(one_after_another()) for _ in range(SEQUENCES)]
        try:
            await asyncio.sleep(SETTLE_S)
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)


class Meter:
    """Items and an engine's processor seconds, per second since its start."""

    def __init__(self, pids: list[int], items: int) -> None:
        self._pids = pids
        self._began = (time.perf_counter(), items, self._used_s())

    def items_per_s(self, items: int) -> float:
        """Return the items answered each second."""
        return (items - self._began[1]) / (time.perf_counter() - self._began[0])

    def processors(self) -> float:
        """Return how many processors the engine used on average."""
        return (self._used_s() - self._began[2]) / (time.perf_counter() - self._began[0])

    def _used_s(self) -> float:
        return sum(map(processor_s, self._pids))


async def run(rounds: int, requests: int) -> str:
    """Measure, and return the table."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    rates: defaultdict[str, list[float]] = defaultdict(list)
    spec = a_spec(
        name="bench",
        context_tokens=2048,
        device_ids=(DeviceId("cpu"),),
        memory_bytes=3 * GIB,
        engine=EngineSettings(
            driver="embedded", kv_memory_bytes=GIB, options={"sequences_max": str(SEQUENCES)}
        ),
    )
    package = Path(str(metadata.distribution(PACKAGE).locate_file(FOLDER)))
    (model,) = package.glob("*.gguf")
    with tempfile.TemporaryDirectory(prefix="batch") as folder:
        async with running_engine(spec, model, Path(folder)) as engine:
            load = EngineClientsLoad(engine, random.Random(1))
            await load.clients(4)
            for _ in range(rounds):
                meter = Meter([engine.pid], load.items)
                times["clients alone"] += await load.clients(requests)
                rates["processors of clients"].append(meter.processors())
                for name, tenant in TENANTS.items():
                    async with load.backlog(tenant):
                        meter = Meter([engine.pid], load.items)
                        await asyncio.sleep(ITEMS_ALONE_S)
                        rates["items alone"].append(meter.items_per_s(load.items))
                        rates["processors of items"].append(meter.processors())
                        meter = Meter([engine.pid], load.items)
                        times[name] += await load.clients(requests)
                        rates[name].append(meter.items_per_s(load.items))
                    await asyncio.sleep(1.0)
    return table(times, {name: median(values) for name, values in rates.items()})


def table(times: dict[str, list[float]], rates: dict[str, float]) -> str:
    """Return the clients' times to the first token, and how much of the idle engine items used."""
    alone = percentiles(times["clients alone"])
    idle_share = 1 - rates["processors of clients"] / rates["processors of items"]
    idle_per_s = idle_share * rates["items alone"]
    lines = [
        row("", [f"p{percentile} ms" for percentile in PERCENTILES]),
        row("clients alone", [f"{value:.0f}" for value in alone]),
    ]
    for name in TENANTS:
        beside = percentiles(times[name])
        lines += [
            row(f"items of {name}", [f"{value:.0f}" for value in beside]),
            row("ratio", [f"{b / a:.2f}" for a, b in zip(alone, beside, strict=True)]),
            f"items per second {rates[name]:.1f} of {idle_per_s:.1f} that were idle:"
            f" {100 * rates[name] / idle_per_s:.0f} %",
        ]
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, measure and print."""
    print(f"{PACKAGE} {metadata.version(PACKAGE)}")
    measure_and_print(str(__doc__), run, rounds=3, requests=40)


if __name__ == "__main__":
    main()
