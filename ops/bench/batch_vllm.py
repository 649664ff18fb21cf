"""Time to first token of clients beside a backlog of batch items, on a real vLLM of a fleet.

    python -m ops.bench.batch_vllm [--rounds 2] [--requests 20]

One replica of SmolLM2-135M on CPUs (`python -m ops.engines.vllm_cpu` installs both) behind a node
and a router. Rounds take turns: clients alone, items alone, and both. Clients' streams come at a
fixed rate. vLLM sorts its queue by priority, but ends nothing that runs: where a stream finds no
free sequence, the node ends the item that began last.

What clients leave idle is computed from the processor time of vLLM: of the items per second without
clients, the share of the processor time that clients alone do not take, beyond what vLLM takes
without any request. On a machine with other load these times say little.
"""

import asyncio
import os
import random
import time
from collections import defaultdict
from statistics import median
from typing import Any, Final

import aiohttp
import msgspec
import openai

from isochrone.cli.manifest import artifact_of, config_values
from nodeagent.host.engines.engine_record import EngineRecord
from ops.bench.batch import (
    PERCENTILES,
    answered,
    begin_backlog,
    end_backlog,
    measure_and_print,
    percentiles,
    row,
)
from ops.bench.batch_engine import (
    CLIENT_TOKENS,
    ITEM_TOKENS,
    ITEM_WORDS,
    PROMPT_WORDS,
    SEQUENCES,
    WORDS,
    Meter,
)
from tests.builders import GIB
from tests.engines.real_engines import MODEL, READY_S, VLLM_COMMANDS, group_members
from tests.system.harness import Fleet, a_fleet, until

RATE_PER_S: Final = 0.5
IDLE_S: Final = 5.0
ITEMS_ALONE_S: Final = 24.0
"""Items of one step of the engine end together, sixteen at a time."""
NODE: Final = "node-ams"
NAME: Final = "smol"
DEPLOYMENT: Final = {
    "deployment_id": NAME,
    "model_id": NAME,
    "engine": {
        "driver": "vllm",
        "kv_memory_bytes": GIB // 2,
        "context_tokens_max": 2048,
        "options": {"max_num_seqs": str(SEQUENCES)},
    },
    "policy": {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]},
}


class Bench:
    """Clients and a backlog of one fleet."""

    def __init__(self, fleet: Fleet, client: openai.AsyncOpenAI) -> None:
        self._fleet = fleet
        self._client = client
        self._draw = random.Random(1)
        (path,) = (fleet.folder / NODE / "engines").glob("*/process.json")
        record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
        self._pids = group_members(record.pid)
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.rates: defaultdict[str, list[float]] = defaultdict(list)

    async def round(self, requests: int) -> None:
        """Measure clients alone, items alone, and both."""
        meter = Meter(self._pids, 0)
        await asyncio.sleep(IDLE_S)
        self.rates["processors without requests"].append(meter.processors())
        meter = Meter(self._pids, 0)
        self.times["alone"] += await self.clients(requests)
        self.rates["processors of clients"].append(meter.processors())
        batch_id = await begin_backlog(self._client, self.item, steady_items=2 * SEQUENCES)
        meter = Meter(self._pids, await answered(self._client, batch_id))
        await asyncio.sleep(ITEMS_ALONE_S)
        self.rates["processors of items"].append(meter.processors())
        items = await answered(self._client, batch_id)
        self.rates["items alone"].append(meter.items_per_s(items))
        meter = Meter(self._pids, items)
        self.times["beside"] += await self.clients(requests)
        items = await answered(self._client, batch_id)
        self.rates["items beside"].append(meter.items_per_s(items))
        await end_backlog(self._client, batch_id)

    async def clients(self, requests: int) -> list[float]:
        """Send clients' streams at a fixed rate; return their times to the first token in ms."""
        async with aiohttp.ClientSession() as http:
            streams = []
            for _ in range(requests):
                streams.append(asyncio.create_task(self._ttft_ms(http)))
                await asyncio.sleep(1 / RATE_PER_S)
            return await asyncio.gather(*streams)

    def item(self, _number: int) -> dict[str, Any]:
        """Return the body of one item."""
        return self._body(ITEM_WORDS, ITEM_TOKENS)

    async def _ttft_ms(self, http: aiohttp.ClientSession) -> float:
        body = {**self._body(PROMPT_WORDS, CLIENT_TOKENS), "stream": True}
        sent = {"authorization": f"Bearer {self._fleet.key}"}
        url = f"{self._fleet.endpoint('ams')}/v1/chat/completions"
        began_s, first_ms = time.perf_counter(), 0.0
        async with http.post(url, json=body, headers=sent) as response:
            response.raise_for_status()
            async for line in response.content:
                if not first_ms and b'"content":"' in line and b'"content":""' not in line:
                    first_ms = 1000 * (time.perf_counter() - began_s)
        return first_ms

    def _body(self, words: int, tokens: int) -> dict[str, Any]:
        text = " ".join(self._draw.choice(WORDS) for _ in range(words))
        return {
            "model": NAME,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
        }


async def run(rounds: int, requests: int) -> str:
    """Measure, and return the table."""
    os.environ["PATH"] = f"{VLLM_COMMANDS}:{os.environ['PATH']}"
    async with a_fleet(comes_up=False, in_memory=False) as fleet:
        fleet.settings["scheduler-a"] = {"batch_folder": str(fleet.folder / "batches")}
        fleet.settings[NODE] = {
            **{"cpu_memory_bytes": 8 * GIB, "engine_threads": 2},
            "canary_interval_s": 60.0,
        }
        await fleet.up()
        artifact = artifact_of(MODEL, f"file:{MODEL}")
        size = {"weights_bytes": artifact.size_bytes, "artifact": msgspec.to_builtins(artifact)}
        model = {"model_id": NAME, **config_values(MODEL), **size}
        await fleet.ask("PUT", f"/v1/models/{NAME}", model)
        await fleet.ask("POST", "/v1/deployments", DEPLOYMENT)
        await until("the replica is warm", lambda: fleet.is_warm(1), READY_S)
        await fleet.routers_know()
        client = openai.AsyncOpenAI(base_url=f"{fleet.endpoint('ams')}/v1", api_key=fleet.key)
        async with client:
            bench = Bench(fleet, client)
            await bench.clients(4)
            for number in range(rounds):
                await bench.round(requests)
                print(f"after {number + 1} rounds", flush=True)
                print(table(bench.times, bench.rates), flush=True)
    return table(bench.times, bench.rates)


def table(times: dict[str, list[float]], measured: dict[str, list[float]]) -> str:
    """Return the clients' times to the first token, and how much of the idle engine items used."""
    rates = {name: median(values) for name, values in measured.items()}
    alone, beside = (percentiles(times[name]) for name in ("alone", "beside"))
    none = rates["processors without requests"]
    client_share = (rates["processors of clients"] - none) / (rates["processors of items"] - none)
    idle_per_s = (1 - client_share) * rates["items alone"]
    items_per_s = rates["items beside"]
    return "\n".join(
        [
            row("", [f"p{percentile} ms" for percentile in PERCENTILES]),
            row("clients alone", [f"{value:.0f}" for value in alone]),
            row("with a backlog", [f"{value:.0f}" for value in beside]),
            row("ratio", [f"{b / a:.2f}" for a, b in zip(alone, beside, strict=True)]),
            f"items per second {items_per_s:.1f} of {idle_per_s:.1f} that were idle:"
            f" {100 * items_per_s / idle_per_s:.0f} %",
            *(f"{name} {value:.2f}" for name, value in rates.items()),
        ]
    )


def main() -> None:
    """Read the arguments, measure and print."""
    measure_and_print(str(__doc__), run, rounds=2, requests=20)


if __name__ == "__main__":
    main()
