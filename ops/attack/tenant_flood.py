"""One tenant floods the embedded engine; how long does another tenant wait for its first token?

    python -m ops.attack.tenant_flood [--sessions] [--clients 50] [--seconds 60]

Starts a scheduler, a node with the demo's chat model, and a router. Prints the other tenant's time
to first token alone and beside the flood, and the flood's tokens per second. With `--sessions` each
request of the flood names a session of its own.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import aiohttp

from isochrone.wire.headers import SESSION_AFFINITY
from ops.fleet.model import NAME, catalogue_entry, deployment_body
from tests.system.harness import CITIES, Fleet, a_fleet, until

POP = "ams"
FLOOD_TOKENS = 64
PROBE_TOKENS = 4
PROBES_ALONE = 30
WARM_UP_S = 10.0
PROBE_PAUSE_S = 0.3
READY_S = 180.0


@dataclass
class Measured:
    """The probes' times to first token in seconds, and the flood's output."""

    alone_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    flood_chunks: int = 0
    refused: int = 0
    is_counting: bool = False


async def start(fleet: Fleet) -> None:
    """Start one scheduler, one node and one router, and deploy the model with defaults."""
    await fleet.start_postgres()
    await fleet.start_scheduler("a")
    await until("the scheduler is active", fleet.acts)
    country, latitude, longitude = CITIES[POP]
    body = {"city": POP, "country": country, "latitude": latitude, "longitude": longitude}
    await fleet.ask("PUT", f"/v1/pops/{POP}", body)
    await fleet.start_node(POP)
    await fleet.start_router(POP)
    entry = catalogue_entry()
    await fleet.ask("PUT", f"/v1/models/{entry['model_id']}", entry)
    deployment = deployment_body(POP)
    deployment["policy"]["replicas_max"] = 1
    await fleet.ask("POST", "/v1/deployments", deployment)

    async def is_warm() -> bool:
        return await fleet.is_warm(1)

    await until("the model is warm", is_warm, READY_S)
    await fleet.routers_know()


async def answers(http: aiohttp.ClientSession, url: str, keys: Sequence[str]) -> bool:
    """Return True if both tenants get an answer."""
    body = request_body("Hello.", 1)
    for key in keys:
        async with http.post(
            url, json=body, headers={"authorization": f"Bearer {key}"}
        ) as response:
            await response.read()
            if response.status != 200:
                return False
    return True


async def first_token_s(http: aiohttp.ClientSession, url: str, key: str, number: int) -> float:
    """Send the small tenant's request; return its time to first token."""
    headers = {"authorization": f"Bearer {key}"}
    body = request_body(f"What is the number after {number}?", PROBE_TOKENS)
    began_s = time.perf_counter()
    async with http.post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        await response.content.readuntil(b"\n\n")
        took_s = time.perf_counter() - began_s
        await response.read()
    return took_s


async def flood(
    http: aiohttp.ClientSession, url: str, key: str, found: Measured, *, sessions: bool
) -> None:
    """Keep one request open without end, and retry soon when it is refused."""
    while True:
        headers = {"authorization": f"Bearer {key}"}
        if sessions:
            headers[SESSION_AFFINITY] = uuid4().hex
        body = request_body(f"Tell me a long story about {uuid4().hex}.", FLOOD_TOKENS)
        async with http.post(url, json=body, headers=headers) as response:
            async for line in response.content:
                found.flood_chunks += found.is_counting and line.startswith(b"data: {")
            is_refused = response.status == 429
            found.refused += found.is_counting and is_refused
        if is_refused:
            await asyncio.sleep(0.5)


def request_body(prompt: str, tokens: int) -> dict[str, object]:
    """Return a streaming chat request."""
    message = {"role": "user", "content": prompt}
    return {"model": NAME, "messages": [message], "max_tokens": tokens, "stream": True}


async def measure(*, clients: int, seconds: float, sessions: bool) -> Measured:
    """Probe alone, then beside `clients` clients of another tenant for `seconds`."""
    found = Measured()
    async with a_fleet(comes_up=False) as fleet:
        await start(fleet)
        keys = [
            (await fleet.ask("POST", "/v1/keys", {"tenant_id": tenant}))["key"]
            for tenant in ("small", "flood")
        ]
        url = f"{fleet.endpoint(POP)}/v1/chat/completions"
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await until("the model answers", lambda: answers(http, url, keys))
            for number in range(PROBES_ALONE):
                found.alone_s.append(await first_token_s(http, url, keys[0], number))
            flooding = [
                asyncio.create_task(flood(http, url, keys[1], found, sessions=sessions))
                for _ in range(clients)
            ]
            await asyncio.sleep(WARM_UP_S)
            found.is_counting = True
            end_s = time.perf_counter() + seconds
            while time.perf_counter() < end_s:
                number = PROBES_ALONE + len(found.beside_s)
                found.beside_s.append(await first_token_s(http, url, keys[0], number))
                await asyncio.sleep(PROBE_PAUSE_S)
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at `share` of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(
        measure(clients=given.clients, seconds=given.seconds, sessions=given.sessions)
    )
    alone_s, beside_s = (quantile(found.alone_s, 0.99), quantile(found.beside_s, 0.99))
    print(
        f"TTFT alone p50 {quantile(found.alone_s, 0.5):.2f} p99 {alone_s:.2f} s; beside"
        f" {given.clients} clients p50 {quantile(found.beside_s, 0.5):.2f} p99 {beside_s:.2f} s"
        f" ({beside_s / alone_s:.1f}x, {len(found.beside_s)} probes); flood"
        f" {found.flood_chunks / given.seconds:.1f} tokens/s, {found.refused} refused"
    )


if __name__ == "__main__":
    main()
