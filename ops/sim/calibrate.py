"""The live half of the calibration: play a trace through the demo fleet and measure it.

    python -m ops.sim.calibrate [--data FOLDER] [--trace NAME] [--seconds N] [--load PERCENT]
        --out FILE.json

Steps: bring the fleet up, deploy, profile each replica alone, play the trace, write the file. The
simulator's half needs only the file: `python -m ops.sim.calibration FILE.json`. Nothing else may
run on the machine: each of the two replicas needs a core. A third replica would slow the others
down, which does not happen between machines.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from isochrone.wire.http import headers
from ops.bench.streamed_answer import stream_frames
from ops.fleet import layout, model
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES, City
from ops.sim import data, traces
from ops.sim.calibration import (
    KV_BLOCK_TOKENS,
    LiveMeasurements,
    PlayedRequest,
    ProfileProbe,
    demo_world,
    fit_replicas,
)
from ops.sim.cases import speed_for_load
from ops.sim.cpu_share import OtherCpuUse

PROMPT_TOKENS_MAX: Final = 1500
OUTPUT_TOKENS_MAX: Final = 48
SIZES: Final = (32, 64, 128, 256, 512, 1024, 1500)
REPEATS: Final = 2
TOGETHER: Final = (1, 2, 4)
"""Numbers of concurrent answers at which the time between tokens is measured."""

PROBES_S: Final = 6.0
"""After this time each router has had more than one answer from each node."""

ERROR_METRIC: Final = "isochrone_router_ttft_prediction_error_seconds_bucket"

SESSIONS_SEED: Final = 99
"""Seed that chooses which of ServeGen's conversations are played."""

SERVING: Final = (CITIES[0], CITIES[-1])
WORDS: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system",
)  # fmt: skip


def text_of(block: int, tokens: int) -> str:
    """Return the text of a block, always the same: each word is one token."""
    chance = random.Random(block)
    return "".join(f" {chance.choice(WORDS)}" for _ in range(tokens))


def shrunk(request: traces.TraceRequest) -> traces.TraceRequest:
    """Return a shorter request with the same shared prefixes, small enough for this fleet.

    A CPU reads prompts some twenty times slower than the simulated replicas. A block of the trace
    becomes one KV block of the engine, and everything else shrinks in proportion.
    """
    shrink = request.block_tokens // KV_BLOCK_TOKENS
    tokens = min(PROMPT_TOKENS_MAX, max(8, request.prompt_tokens // shrink))
    return request._replace(
        prompt_tokens=tokens,
        output_tokens=min(OUTPUT_TOKENS_MAX, max(2, request.output_tokens // shrink)),
        blocks=request.blocks[: tokens // KV_BLOCK_TOKENS],
        block_tokens=KV_BLOCK_TOKENS,
    )


def prompt_of(request: traces.TraceRequest) -> str:
    """Return a prompt with the text of the request's blocks, then text of its own."""
    rest = request.prompt_tokens - len(request.blocks) * KV_BLOCK_TOKENS
    shared = "".join(text_of(block, KV_BLOCK_TOKENS) for block in request.blocks)
    return (shared + text_of(-1 - request.number, rest)).strip()


class CityClients:
    """Sends requests as clients in the cities do."""

    def __init__(self, fleet: LocalFleet, http: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._http = http

    async def request(
        self, city: City, prompt: str, output: int, session: str = ""
    ) -> dict[str, Any]:
        """Send a request to a city's public endpoint; return what the client measured."""
        sent = {"authorization": f"Bearer {self._fleet.key}"}
        if session:
            sent[headers.SESSION_AFFINITY] = session
        return await self._send(layout.endpoint(city), prompt, output, sent)

    async def request_replica(
        self, city: City, replica: str, prompt: str, output: int
    ) -> dict[str, Any]:
        """Send a request to one replica through its node, without a router or a delay."""
        sent = {headers.REPLICA: replica}
        node = f"http://{city.listen_host}:{layout.NODE_PORT}"
        return await self._send(node, prompt, output, sent)

    async def _send(
        self, base: str, prompt: str, output: int, sent: dict[str, str]
    ) -> dict[str, Any]:
        body = msgspec.json.encode(
            {
                "model": model.NAME,
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        sent = {**sent, "content-type": "application/json"}
        began = time.monotonic()
        url = f"{base}/v1/completions"
        first = last = 0.0
        usage: dict[str, Any] = {}
        async with self._http.post(url, data=body, headers=sent) as response:
            async for frame in stream_frames(response.content):
                if "error" in frame:
                    raise RuntimeError(f"cannot calibrate: {frame['error']['message']}")
                usage = frame.get("usage") or usage
                if frame["choices"]:
                    last = time.monotonic()
                    first = first or last
            if response.status != 200:
                raise RuntimeError(f"cannot calibrate: {base} answered {response.status}")
        return {
            "ttft_s": first - began,
            "itl_s": (last - first) / max(1, usage["completion_tokens"] - 1),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "output_tokens": usage["completion_tokens"],
            "served_in": response.headers.get(headers.POP, "?"),
        }


async def deploy(fleet: LocalFleet) -> None:
    """Deploy the demo's model with one thread in each serving city, without scaling by demand."""
    await fleet.ask(
        "PUT", f"/v1/models/{model.NAME}", await asyncio.to_thread(model.catalogue_entry)
    )
    body = model.deployment_body(SERVING[0].pop)
    body["engine"]["options"] = {"threads": "1", "draft_tokens_max": "0"}
    body["engine"]["kv_memory_bytes"] = 1 << 30
    warm = [city.pop for city in SERVING]
    body["policy"] = {"replicas_min": 2, "replicas_max": 2, "keep_warm": warm}
    await fleet.ask("POST", "/v1/deployments", body)
    for city in SERVING:
        await fleet.wait_warm(city)
    await fleet.wait_routed()
    # Wait until the routers have measured the round trips.
    await asyncio.sleep(PROBES_S)


async def profile(fleet: LocalFleet, clients: CityClients, city: City) -> list[ProfileProbe]:
    """Measure one replica alone: prompts of all sizes, then several answers at once."""
    placed = await fleet.placements()
    replica = next(row["replica_id"] for row in placed if row["pop"] == city.pop)
    probes: list[ProfileProbe] = []
    number = 10**6

    async def probe(tokens: int, output: int, together: int) -> None:
        nonlocal number
        texts = [text_of(-number - n, tokens).strip() for n in range(together)]
        number += together
        answers = await asyncio.gather(
            *(clients.request_replica(city, replica, text, output) for text in texts)
        )
        probes.extend(
            ProfileProbe(
                city.pop,
                together,
                answer["prompt_tokens"],
                answer["ttft_s"],
                answer["itl_s"],
                answer["output_tokens"],
            )
            for answer in answers
        )

    await probe(64, 4, 1)
    probes.clear()
    for tokens in SIZES * REPEATS:
        await probe(tokens, 2, 1)
    for together in TOGETHER:
        await probe(32, 32, together)
    return probes


async def play(
    clients: CityClients, requests: list[traces.TraceRequest], speed: float
) -> list[PlayedRequest]:
    """Send each request at its time, whether or not earlier ones are answered."""
    began = time.monotonic()

    async def play_one(request: traces.TraceRequest) -> PlayedRequest:
        at_s = request.at_s / speed
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        late_s = time.monotonic() - began - at_s
        city = CITIES[int(request.place * len(CITIES))]
        answer = await clients.request(
            city, prompt_of(request), request.output_tokens, request.session
        )
        return PlayedRequest(
            request.number, at_s, city.pop, request.session, request.blocks, late_s, **answer
        )

    return list(await asyncio.gather(*(play_one(request) for request in requests)))


async def prediction_errors(http: aiohttp.ClientSession) -> dict[str, float]:
    """Return the histogram of prediction errors of all routers: counts by upper bound."""
    counts: dict[str, float] = {}
    for city in CITIES:
        async with http.get(f"{layout.endpoint(city)}/metrics") as page:
            for line in (await page.text()).splitlines():
                name, _, count = line.rpartition(" ")
                if name.startswith(ERROR_METRIC):
                    bound = name.partition('le="')[2].partition('"')[0]
                    counts[bound] = counts.get(bound, 0.0) + float(count)
    return counts


def mooncake(folder: Path) -> Iterator[list[traces.TraceRequest]]:
    """Yield ever longer parts of Mooncake's conversations, which have few common prefixes."""
    path = folder / "traces/mooncake_conversation_trace.jsonl.gz"
    trace = [shrunk(request) for request in traces.mooncake(path, traces.TraceSlice(3000))]
    for count in range(100, len(trace), 20):
        yield trace[:count]


def sessions(folder: Path) -> Iterator[list[traces.TraceRequest]]:
    """Yield ever more whole conversations of ServeGen, which have long common prefixes."""
    trace = [
        shrunk(request) for request in traces.sessions(folder / "servegen", traces.TraceSlice(3000))
    ]
    place = {r.session: traces.session_place(r.session, SESSIONS_SEED) for r in trace}
    for share in np.arange(0.03, 1.0, 0.005):
        yield [request for request in trace if place[request.session] < share]


TRACES: Final = {"mooncake": (mooncake, 0.2), "servegen": (sessions, 0.65)}
"""Ever longer parts of a trace, and which share of its prompts is expected to be cached."""


async def run(folder: Path, trace: str, seconds: float, load: float) -> LiveMeasurements:
    """Bring the fleet up, measure, play, and take it down."""
    fleet = LocalFleet(layout.STATE, print)
    try:
        await fleet.up()
        await deploy(fleet)
        limits = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(connector=limits, timeout=timeout) as http:
            clients = CityClients(fleet, http)
            other_cpu = OtherCpuUse()
            # At the same time, as in the measurement: they share the machine's memory.
            found = await asyncio.gather(*(profile(fleet, clients, city) for city in SERVING))
            probes = [probe for of_one in found for probe in of_one]
            profiles = fit_replicas(probes)
            # Or routers would take the profile's load for what waits.
            await asyncio.sleep(PROBES_S)
            others = [other_cpu.share()]
            print(profiles)
            parts, cached_share = TRACES[trace]
            # As many requests as take `seconds` at this load.
            for requests in parts(folder):
                speed = speed_for_load(load / 100, demo_world(profiles), requests, cached_share)
                if requests[-1].at_s / speed >= seconds:
                    break
            print(f"{len(requests)} requests, trace sped up {speed:.3f} times")
            played = await play(clients, requests, speed)
            others.append(other_cpu.share())
            errors = await prediction_errors(http)
        return LiveMeasurements(probes, played, load, others=others, errors=errors)
    finally:
        await fleet.down()


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.calibrate")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--trace", choices=TRACES, default="mooncake")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long to play the trace")
    parser.add_argument("--load", type=float, default=60.0, help="in percent")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    live = asyncio.run(
        run(data.folder(arguments.data), arguments.trace, arguments.seconds, arguments.load)
    )
    arguments.out.write_text(
        json.dumps(
            {
                "load": live.load,
                "words_age_s": live.words_age_s,
                "others": live.others,
                "errors": live.errors,
                "probes": [probe._asdict() for probe in live.probes],
                "asked": [played._asdict() for played in live.asked],
            }
        )
    )


if __name__ == "__main__":
    main()
