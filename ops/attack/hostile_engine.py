"""An engine attacks the agent and the router that use it; what do its neighbours notice?

    python -m ops.attack.hostile_engine [--seconds 4] [--only NAME]

Starts a fleet in which one node runs a hostile server (`hostile_server.py`) beside a mock engine.
For each attack, four clients send requests that the server answers with it, and others ask the mock
engine. Prints the statuses, the most memory that the agent and the router had more than before, and
the longest time that an answer of the mock engine and a ping of the node took.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from isochrone.cli.manifest import artifact_of
from ops.attack.control_port_strangers import memory_kib
from ops.attack.hostile_server import attacks
from tests.system.harness import Fleet, a_fleet, until

SERVER = Path(__file__).with_name("hostile_server.py")
POP = "ams"
CLIENTS = 4
PAUSE_S = 0.05
ANSWER_S_MAX = 60.0


class Watch:
    """The memory of processes, and how long others' requests take, while an attack runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._pids = {name: fleet.processes.pid(f"{name}-{POP}") for name in ("node", "router")}
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self._before_kib = {name: memory_kib(pid, "VmRSS") for name, pid in self._pids.items()}
        self.grown_mib = dict.fromkeys(self._pids, 0.0)
        self.slowest_s = {"answer": 0.0, "ping": 0.0}
        self.failed = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            await asyncio.gather(self._ask(http), self._ping(http), self._weigh())

    async def _weigh(self) -> None:
        while True:
            for name, pid in self._pids.items():
                grown_mib = (memory_kib(pid, "VmRSS") - self._before_kib[name]) / 1024
                self.grown_mib[name] = max(self.grown_mib[name], grown_mib)
            await asyncio.sleep(PAUSE_S / 5)

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        while True:
            began_s = time.perf_counter()
            self.failed += await ask(self._fleet, http, "mock", "") != "200"
            self._note("answer", began_s)
            await asyncio.sleep(PAUSE_S)

    async def _ping(self, http: aiohttp.ClientSession) -> None:
        while True:
            began_s = time.perf_counter()
            with suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(f"{self._fleet.url(f'node-{POP}')}/ping") as pong:
                    await pong.read()
            self._note("ping", began_s)
            await asyncio.sleep(PAUSE_S)

    def _note(self, what: str, began_s: float) -> None:
        self.slowest_s[what] = max(self.slowest_s[what], time.perf_counter() - began_s)


async def ask(fleet: Fleet, http: aiohttp.ClientSession, model: str, attack: str) -> str:
    """Send a request; return its status, or how it failed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "user": attack,
        "stream": "frame" in attack or "chunk" in attack,
    }
    sent = {"authorization": f"Bearer {fleet.key}"}
    url = f"{fleet.endpoint(POP)}/v1/chat/completions"
    try:
        async with http.post(url, json=body, headers=sent) as response:
            async for _ in response.content.iter_any():
                pass
            return str(response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


async def attack(fleet: Fleet, watch: Watch, name: str, seconds: float) -> str:
    """Attack for some seconds; return the line to print."""
    statuses: Counter[str] = Counter()
    page_url = f"{fleet.url(f'node-{POP}')}/metrics"
    deadline_s = time.monotonic() + seconds

    async def client(http: aiohttp.ClientSession) -> None:
        while time.monotonic() < deadline_s:
            statuses[await ask(fleet, http, "hostile", name)] += 1
            if name.startswith("metrics"):
                async with http.get(page_url) as page:
                    await page.read()

    watch.begin()
    timeout = aiohttp.ClientTimeout(total=2 * seconds)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)), return_exceptions=True)
    grown = ", ".join(f"{process} {mib:+.0f} MiB" for process, mib in watch.grown_mib.items())
    slowest = ", ".join(f"{what} {s:.2f} s" for what, s in watch.slowest_s.items())
    return f"{name}: {dict(statuses)}; {grown}; slowest {slowest}; {watch.failed} others failed"


async def deploy(fleet: Fleet) -> None:
    """Deploy the hostile server beside the mock engine."""
    await fleet.deploy(replicas=1, keep_warm=[POP])
    artifact = artifact_of(fleet.folder / "model", f"file:{fleet.folder / 'model'}")
    model = {
        "model_id": "hostile",
        "architecture": "none",
        "artifact": msgspec.to_builtins(artifact),
        "context_tokens": 100_000,
        "weights_bytes": 1000,
    }
    await fleet.tell("PUT", "/v1/models/hostile", model)
    options = {"command": "hostile", "surfaces": "chat", "shared_prompt_cache": "true"}
    engine = {
        "driver": "command",
        "kv_memory_bytes": 1_000_000,
        "context_tokens_max": 100_000,
        "options": {**options, "concurrency": str(CLIENTS)},
    }
    policy = {"replicas_min": 1, "replicas_max": 1, "keep_warm": [POP]}
    body = {"deployment_id": "hostile", "model_id": "hostile", "engine": engine, "policy": policy}
    await fleet.tell("POST", "/v1/deployments", body)
    await until("both are warm", lambda: fleet.is_warm(2), 120.0)
    await fleet.routers_know()


async def run(seconds: float, only: str) -> None:
    """Run each attack on one fleet."""
    async with a_fleet(comes_up=False) as fleet:
        command = {
            "arguments": [sys.executable, str(SERVER), "{port}"],
            "metrics_path": "/metrics",
        }
        fleet.settings[f"node-{POP}"] = {"commands": {"hostile": command}}
        await fleet.up()
        await deploy(fleet)
        watch = Watch(fleet)
        watching = asyncio.create_task(watch.run())
        try:
            for name in attacks(0):
                if only in name:
                    print(await attack(fleet, watch, name, seconds), flush=True)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def main() -> None:
    """Run the attacks and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each attack")
    parser.add_argument("--only", default="", help="attacks with this in their names")
    given = parser.parse_args()
    asyncio.run(run(given.seconds, given.only))


if __name__ == "__main__":
    main()
