"""Compares engines that answer the same prompts with the same model, behind the same router.

    python -m ops.bench.engines [--folder .engines] [--engines embedded llama_cpp ...] [--rounds 2]

A whole fleet runs on this machine; the engines run on its one node in turn, each deployed as an
operator would. Clients stream answers of a fixed length from the router, 1, 8 and 32 at a time, and
no two prompts have a prefix in common. Needs `python -m ops.engines.vllm_cpu` and
`python -m ops.engines.llama_cpp` for the engines of other vendors; one that is not installed is
left out. Only figures of one run can be compared, and only where the machine's load was the same:
the last column has its average over the row's last minute. An idle machine has about 2 there.
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec

from isochrone.cli.manifest import artifact_of, config_values
from nodeagent.decide.replicas.sleep import WAKE_LIMIT_MAX_S, SleepOutcome
from nodeagent.drivers import DRIVERS
from nodeagent.host.devices import CPU, DeviceReader
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.engine_record import EngineRecord
from ops.bench.streamed_answer import read_chat
from ops.engines.vllm_cpu import ROOT, small_chat_model
from tests.system.harness import Fleet, a_fleet, until

GIB: Final = 1 << 30
CITY: Final = "ams"
NODE: Final = f"node-{CITY}"
CONTEXT_TOKENS: Final = 2048
WARM_TIMEOUT_S: Final = 600.0
CLIENTS: Final = (1, 8, 32)
PROMPT_WORDS: Final = 100
LONG_PROMPT_WORDS: Final = 800
ANSWER_TOKENS: Final = 64
WAKES: Final = 5
WORDS: Final = ("river", "stone", "cloud", "market", "winter", "letter", "garden", "silver")


class Contestant(NamedTuple):
    """One engine: its driver and options, the folder of the model in its best format."""

    driver: str
    model: Path
    options: Mapping[str, str]
    kv_bytes: int


class Answer(NamedTuple):
    """The times of one streamed answer, in seconds from its request."""

    first_s: float
    last_s: float
    prompt_tokens: int
    tokens: int

    @property
    def itl_ms(self) -> float:
        """The mean time between tokens."""
        return 1000 * (self.last_s - self.first_s) / max(1, self.tokens - 1)


class LoadFigures(NamedTuple):
    """The figures of a run, as a number of clients saw them."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_most_ms: float
    itl_p50_ms: float


def contestants(engines: Path) -> dict[str, Contestant]:
    """Return the engines that can run, by the name of their row."""
    published, q4_0 = engines / "smollm2-gguf" / "published", engines / "smollm2-gguf" / "q4_0"
    bundled = small_chat_model().parent
    floats = engines / "smollm2"
    slots = {"sequences_max": "32"}
    every = {
        "embedded Q4_1": Contestant(
            "embedded", published if published.exists() else bundled, slots, 2 * GIB
        ),
        "embedded Q4_0": Contestant("embedded", q4_0, slots, 2 * GIB),
        "embedded fp32": Contestant("embedded", floats, slots | {"quantisation": "none"}, 2 * GIB),
        "llama.cpp Q4_0": Contestant(
            "llama_cpp", q4_0, {"parallel": "32", "kv_unified": "false"}, 2 * GIB
        ),
        "vLLM bf16": Contestant("vllm", floats, {"max_num_seqs": "32"}, GIB),
    }
    return {name: one for name, one in every.items() if one.model.exists()}


class EngineTrial:
    """One engine on the fleet's node."""

    def __init__(self, fleet: Fleet, name: str, one: Contestant) -> None:
        self._fleet = fleet
        self._name = name
        self._one = one
        self._id = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        self._random = random.Random(7)

    async def deploy(self) -> float:
        """Deploy it; return the seconds until it is warm."""
        artifact = artifact_of(self._one.model, f"file:{self._one.model}")
        described = {"artifact": msgspec.to_builtins(artifact)}
        size = {"weights_bytes": artifact.size_bytes, "context_tokens": CONTEXT_TOKENS}
        has_config = (self._one.model / "config.json").exists()
        config = config_values(self._one.model) if has_config else {"architecture": "gguf"}
        model = {**size, **config, **described, "model_id": self._id}
        await self._fleet.ask("PUT", f"/v1/models/{self._id}", model)
        engine = {
            "driver": self._one.driver,
            "kv_memory_bytes": self._one.kv_bytes,
            "context_tokens_max": CONTEXT_TOKENS,
            "tokens_in_flight_max": 64 * CONTEXT_TOKENS,
            "options": dict(self._one.options),
        }
        policy = {"replicas_min": 1, "replicas_max": 1, "allow": [CITY]}
        started_s = time.monotonic()
        await self._fleet.ask(
            "POST",
            "/v1/deployments",
            {"deployment_id": self._id, "model_id": self._id, "engine": engine, "policy": policy},
        )
        await until(f"{self._name} is warm", lambda: self._fleet.is_warm(1), WARM_TIMEOUT_S)
        took_s = time.monotonic() - started_s
        await self._fleet.routers_know()
        return took_s

    def record(self) -> EngineRecord:
        """Return what the agent wrote about the running engine."""
        (path,) = (self._fleet.folder / NODE / "engines").glob("*/process.json")
        return msgspec.json.decode(path.read_bytes(), type=EngineRecord)

    def memory_bytes(self) -> int:
        """Return the resident memory of all processes of the engine."""
        reader = DeviceReader(0, open_nvml=lambda: None)
        return reader.used_by(self.record().pid, (CPU,))

    async def answer(self, http: aiohttp.ClientSession, words: int, tokens: int) -> Answer:
        """Stream one answer to a prompt that no other begins like."""
        text = " ".join(self._random.choice(WORDS) for _ in range(words))
        body = {
            "model": self._id,
            "messages": [{"role": "user", "content": f"{self._random.random()} {text}"}],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = {"authorization": f"Bearer {self._fleet.key}"}
        url = f"{self._fleet.endpoint(CITY)}/v1/chat/completions"
        started_s = time.monotonic()
        async with http.post(url, json=body, headers=sent) as response:
            response.raise_for_status()
            first_at_s, last_at_s, usage = await read_chat(response.content)
        return Answer(
            first_at_s - started_s,
            last_at_s - started_s,
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )

    async def load(self, clients: int, rounds: int) -> LoadFigures:
        """Stream answers with a number of clients at once, each one after the other."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def client() -> list[Answer]:
                return [await self.answer(http, PROMPT_WORDS, ANSWER_TOKENS) for _ in range(rounds)]

            await self.answer(http, PROMPT_WORDS, 4)
            started_s = time.monotonic()
            answers = [one for some in await asyncio.gather(*(client() for _ in range(clients)))
                       for one in some]  # fmt: skip
            took_s = time.monotonic() - started_s
        ttft_ms = [1000 * one.first_s for one in answers]
        return LoadFigures(
            sum(one.tokens for one in answers) / took_s,
            statistics.median(ttft_ms),
            max(ttft_ms),
            statistics.median(one.itl_ms for one in answers),
        )

    async def prefill_tokens_per_s(self, rounds: int) -> float:
        """Return the rate at which a long prompt is read when nothing else runs."""
        async with aiohttp.ClientSession() as http:
            answers = [await self.answer(http, LONG_PROMPT_WORDS, 16) for _ in range(rounds)]
        return statistics.median(one.prompt_tokens / one.first_s for one in answers)

    async def wake_ms(self) -> float:
        """Return how long the engine takes to wake up; 0 if it cannot sleep as it is deployed."""
        record = self.record()
        # On a CPU vLLM answers that it sleeps, and keeps its memory.
        if self._one.driver != "embedded" or not DRIVERS[self._one.driver].sleep_path:
            return 0.0
        engine = EngineProcess(record, Path("/nonexistent"), None)
        took_ms = []

        async def falls_asleep() -> bool:
            return await engine.fall_asleep(WAKE_LIMIT_MAX_S) is SleepOutcome.ASLEEP

        try:
            for _ in range(WAKES):
                await until("it sleeps", falls_asleep)
                started_s = time.monotonic()
                assert await engine.wake_up(WAKE_LIMIT_MAX_S)
                took_ms.append(1000 * (time.monotonic() - started_s))
        finally:
            await engine.release()
        return statistics.median(took_ms)

    async def delete(self) -> None:
        """Delete the deployment, and wait until its engine is gone."""
        await self._fleet.ask("DELETE", f"/v1/deployments/{self._id}")

        async def is_gone() -> bool:
            return not list((self._fleet.folder / NODE / "engines").glob("*/process.json"))

        await until("the engine has ended", is_gone, WARM_TIMEOUT_S)


async def measure(fleet: Fleet, name: str, one: Contestant, rounds: int) -> str:
    """Return an engine's row of the table."""
    trial = EngineTrial(fleet, name, one)
    start_s = await trial.deploy()
    cells = [name, f"{start_s:.1f}"]
    figures = [await trial.load(clients, rounds) for clients in CLIENTS]
    cells.append(" / ".join(f"{one.tokens_per_s:.0f}" for one in figures))
    cells.append(" / ".join(f"{one.ttft_p50_ms:.0f}" for one in figures))
    cells.append(" / ".join(f"{one.ttft_most_ms:.0f}" for one in figures))
    cells.append(" / ".join(f"{one.itl_p50_ms:.1f}" for one in figures))
    cells.append(f"{await trial.prefill_tokens_per_s(rounds + 1):.0f}")
    cells.append(f"{trial.memory_bytes() / GIB:.2f}")
    wake_ms = await trial.wake_ms()
    cells.append(f"{wake_ms:.0f}" if wake_ms else "cannot")
    cells.append(f"{os.getloadavg()[0]:.1f}")
    await trial.delete()
    return "| " + " | ".join(cells) + " |"


async def compare(engines: Path, names: Sequence[str], rounds: int) -> None:
    """Run the engines in turn, and print the table."""
    head = [
        *("", "start s", "tokens/s", "TTFT p50 ms", "TTFT most ms", "ITL p50 ms"),
        *("prefill tokens/s", "memory GiB", "wake ms", "load"),
    ]
    found = {name: one for name, one in contestants(engines).items() if not names or name in names}
    print(f"Three figures are for {', '.join(map(str, CLIENTS))} clients.\n")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    async with a_fleet(comes_up=False, in_memory=False) as fleet:
        fleet.settings[NODE] = {
            "cpu_memory_bytes": 12 * GIB,
            "engine_threads": os.cpu_count() or 1,
        }
        await fleet.up()
        for name, one in found.items():
            if missing := DRIVERS[one.driver].missing():
                print(f"(without {name}: {missing})", file=sys.stderr)
                continue
            print(await measure(fleet, name, one, rounds), flush=True)
    python = platform.python_version()
    print(f"\n{os.cpu_count()} cores, {platform.platform()}, Python {python}")
    print(f"torch {metadata.version('torch')}")


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".engines")
    parser.add_argument("--engines", nargs="+", default=[], help="rows of the table; default: all")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each client")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    commands = [str(folder / engine / "bin") for engine in ("vllm", "llama_cpp")]
    os.environ["PATH"] = os.pathsep.join([*commands, os.environ["PATH"]])
    asyncio.run(compare(folder, arguments.engines, arguments.rounds))


if __name__ == "__main__":
    main()
