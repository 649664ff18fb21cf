"""The live half of the calibration: a trace played through the demo fleet, as its clients saw it.

    python -m ops.sim.calibrate [--data FOLDER] [--trace NAME] [--seconds N] [--load PERCENT]
        --out FILE.json

CORRIDOR: bring up -> deploy -> profile each replica alone -> play -> keep what was seen. What the
simulator makes of the same arrivals is worked out afterwards, from the file alone:
`python -m ops.sim.calibration FILE.json`. Needs the machine for itself: one core for each of two
replicas. With a third, replicas would slow one another down, which machines of their own do not.
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

from isochrone.wire import headers
from ops.fleet import layout, model
from ops.fleet.bring_up import LocalFleet
from ops.fleet.cities import CITIES, City
from ops.sim import data, traces
from ops.sim.alone import Alone
from ops.sim.calibration import BLOCK, Asked, Live, Probe, fitted, world_of
from ops.sim.cases import speed_for

PROMPT_TOKENS_MAX: Final = 1500
OUTPUT_TOKENS_MAX: Final = 48
SIZES: Final = (32, 64, 128, 256, 512, 1024, 1500)
TWICE: Final = 2
TOGETHER: Final = (1, 2, 4)
"""How many answers are written at once where the time between tokens is measured."""

PROBES_S: Final = 6.0
"""By then each router has heard of each node more than once."""

ERROR_METRIC: Final = "isochrone_router_ttft_prediction_error_seconds_bucket"

SESSIONS_SEED: Final = 99
"""Draws which of ServeGen's conversations are played."""

SERVING: Final = (CITIES[0], CITIES[-1])
WORDS: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system",
)  # fmt: skip


def text_of(block: int, tokens: int) -> str:
    """Return a block's text, always the same: one token a word."""
    chance = random.Random(block)
    return "".join(f" {chance.choice(WORDS)}" for _ in range(tokens))


def shrunk(request: traces.Request) -> traces.Request:
    """Return a request as this fleet can bear it: shorter, and shared as before.

    A CPU reads prompts some twenty times slower than the replicas of the proof. Blocks that
    requests share become blocks of the engine's KV, and all else shrinks by as much.
    """
    shrink = request.block_tokens // BLOCK
    tokens = min(PROMPT_TOKENS_MAX, max(8, request.prompt_tokens // shrink))
    return request._replace(
        prompt_tokens=tokens,
        output_tokens=min(OUTPUT_TOKENS_MAX, max(2, request.output_tokens // shrink)),
        blocks=request.blocks[: tokens // BLOCK],
        block_tokens=BLOCK,
    )


def prompt_of(request: traces.Request) -> str:
    """Return a prompt of a request's blocks, and behind them what it shares with nobody."""
    rest = request.prompt_tokens - len(request.blocks) * BLOCK
    shared = "".join(text_of(block, BLOCK) for block in request.blocks)
    return (shared + text_of(-1 - request.number, rest)).strip()


class Player:
    """A client in each city."""

    def __init__(self, fleet: LocalFleet, http: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._http = http

    async def ask(self, city: City, prompt: str, output: int, session: str = "") -> dict[str, Any]:
        """Ask through a city's public endpoint; return what was seen of the answer."""
        sent = {"authorization": f"Bearer {self._fleet.key}"}
        if session:
            sent[headers.SESSION_AFFINITY] = session
        return await self._ask(layout.endpoint(city), prompt, output, sent)

    async def ask_replica(
        self, city: City, replica: str, prompt: str, output: int
    ) -> dict[str, Any]:
        """Ask one replica at its node's door, without a router or a distance."""
        sent = {headers.REPLICA: replica}
        door = f"http://{city.door_host}:{layout.NODE_PORT}"
        return await self._ask(door, prompt, output, sent)

    async def _ask(
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
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                frame = msgspec.json.decode(line[6:])
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
    """Deploy the demo's model on one thread in each serving city, without growth by demand."""
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
    # Routers must have measured how far the nodes are.
    await asyncio.sleep(PROBES_S)


async def profile(fleet: LocalFleet, player: Player, city: City) -> list[Probe]:
    """Ask one replica alone: prompts of all sizes, then answers side by side."""
    placed = await fleet.placements()
    replica = next(row["replica_id"] for row in placed if row["pop"] == city.pop)
    probes, number = [], 10**6

    async def probe(tokens: int, output: int, together: int) -> None:
        nonlocal number
        texts = [text_of(-number - n, tokens).strip() for n in range(together)]
        number += together
        seen = await asyncio.gather(
            *(player.ask_replica(city, replica, text, output) for text in texts)
        )
        for one in seen:
            took = (one["prompt_tokens"], one["ttft_s"], one["itl_s"], one["output_tokens"])
            probes.append(Probe(city.pop, together, *took))

    await probe(64, 4, 1)
    probes.clear()
    for tokens in SIZES * TWICE:
        await probe(tokens, 2, 1)
    for together in TOGETHER:
        await probe(32, 32, together)
    return probes


async def play(player: Player, requests: list[traces.Request], speed: float) -> list[Asked]:
    """Send each request when its time has come, whatever became of those before it."""
    began = time.monotonic()

    async def one(request: traces.Request) -> Asked:
        at_s = request.at_s / speed
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        late_s = time.monotonic() - began - at_s
        city = CITIES[int(request.place * len(CITIES))]
        seen = await player.ask(city, prompt_of(request), request.output_tokens, request.session)
        return Asked(
            request.number, at_s, city.pop, request.session, request.blocks, late_s, **seen
        )

    return list(await asyncio.gather(*(one(request) for request in requests)))


async def prediction_errors(http: aiohttp.ClientSession) -> dict[str, float]:
    """Return all routers' own metric of how far their predictions were off: counts by bound."""
    counts: dict[str, float] = {}
    for city in CITIES:
        async with http.get(f"{layout.endpoint(city)}/metrics") as page:
            for line in (await page.text()).splitlines():
                name, _, count = line.rpartition(" ")
                if name.startswith(ERROR_METRIC):
                    bound = name.partition('le="')[2].partition('"')[0]
                    counts[bound] = counts.get(bound, 0.0) + float(count)
    return counts


def mooncake(folder: Path) -> Iterator[list[traces.Request]]:
    """Give ever longer parts of Mooncake's conversations: few prompts are cached."""
    path = folder / "traces/mooncake_conversation_trace.jsonl.gz"
    trace = [shrunk(request) for request in traces.mooncake(path, traces.Part(3000))]
    for count in range(100, len(trace), 20):
        yield trace[:count]


def sessions(folder: Path) -> Iterator[list[traces.Request]]:
    """Give ever more of ServeGen's conversations, each whole: most of a prompt is cached."""
    trace = [shrunk(request) for request in traces.sessions(folder / "servegen", traces.Part(3000))]
    drawn = {one.session: traces.place_of(one.session, SESSIONS_SEED) for one in trace}
    for share in np.arange(0.03, 1.0, 0.005):
        yield [one for one in trace if drawn[one.session] < share]


TRACES: Final = {"mooncake": (mooncake, 0.2), "servegen": (sessions, 0.65)}
"""Ever longer parts of a trace, and which share of its prompts is expected to be cached."""


async def run(folder: Path, trace: str, seconds: float, load: float) -> Live:
    """Bring the fleet up, measure, play, and take it down."""
    fleet = LocalFleet(layout.STATE, print)
    try:
        await fleet.up()
        await deploy(fleet)
        limits = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(connector=limits, timeout=timeout) as http:
            player = Player(fleet, http)
            alone = Alone()
            # At the same time, as they will be asked: they share the machine's memory.
            found = await asyncio.gather(*(profile(fleet, player, city) for city in SERVING))
            probes = [probe for of_one in found for probe in of_one]
            profiles = fitted(probes)
            # Or routers would take the profile's load for what waits.
            await asyncio.sleep(PROBES_S)
            others = [alone.others_share()]
            print(profiles)
            parts, cached_share = TRACES[trace]
            # As many requests as take `seconds` at this load.
            for requests in parts(folder):
                speed = speed_for(load / 100, world_of(profiles), requests, cached_share)
                if requests[-1].at_s / speed >= seconds:
                    break
            print(f"{len(requests)} requests, trace sped up {speed:.3f} times")
            asked = await play(player, requests, speed)
            others.append(alone.others_share())
            errors = await prediction_errors(http)
        return Live(probes, asked, load, others=others, errors=errors)
    finally:
        await fleet.down()


def main() -> None:
    """Measure, and keep it."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.calibrate")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--trace", choices=TRACES, default="mooncake")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long to play")
    parser.add_argument("--load", type=float, default=60.0, help="in percent")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    live = asyncio.run(run(data.folder(asked.data), asked.trace, asked.seconds, asked.load))
    asked.out.write_text(
        json.dumps(
            {
                "load": live.load,
                "words_age_s": live.words_age_s,
                "others": live.others,
                "errors": live.errors,
                "probes": [probe._asdict() for probe in live.probes],
                "asked": [one._asdict() for one in live.asked],
            }
        )
    )


if __name__ == "__main__":
    main()
