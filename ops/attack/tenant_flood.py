"""One tenant floods an engine; how long does another tenant wait for its first token?

    python -m ops.attack.tenant_flood [--engine vllm] [--threads 1] [--sessions] [--clients 50]

Starts a scheduler, a node with one engine (the embedded one with the demo's settings, or a real
vLLM with as many seats), and a router. Probes are sent alone, and then beside the flood in
alternating phases: none, with a key of another tenant, and with a key of the flooding tenant, for
which every queue is first come, first served. They are sent at fixed times, answered or not, so
that the engine has the same work in both phases with probes. Prints the times to first token, the
tokens per second that the engine generated meanwhile for both tenants and those of prompts that it
computed, when the slowest probes were sent, and where these waited: each probe is traced, and the
kernel's count of waits for a processor is sampled. With `--sessions` each request of the flood
names a session of its own.
"""

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import aiohttp
import msgspec

from isochrone.service.tracing import names
from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.http.headers import SESSION_AFFINITY, TRACEPARENT
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.engine_record import EngineRecord
from ops.attack.engine_histograms import Counts, describe, read_histograms
from ops.attack.flooded_engines import TARGETS, FloodTarget
from ops.attack.processor_waits import ProcessorWaits, first_child
from ops.sim.measure import percentile
from tests.otlp_collector import Collector, a_collector
from tests.system.harness import CITIES, Fleet, a_fleet, until

POP = "ams"
PROBE_TOKENS = 4
PROBES_ALONE = 60
PROBES_TO_WARM_UP = 5
WARM_UP_S = 10.0
SETTLE_S = 12.0
"""Longer than steps stay short after a small tenant's prompt (SHORT_STEPS_S)."""

PROBE_EVERY_S = 0.6
REFUSED_PAUSE_S = 0.5
READY_S = 300.0
SLOWEST = 6
EXPORTED_S = 3.0
"""Longer than routers and nodes keep finished spans."""

WAITS = {"in the router's queue": "wait for capacity", "for a seat": "admission"}
"""The spans of a request's waits before the engine has it."""

NO_PROBES, OTHER_TENANT, SAME_TENANT = "none", "another tenant", "the same tenant"
PHASES = (NO_PROBES, OTHER_TENANT, SAME_TENANT)


class Probe(NamedTuple):
    """One short request: its time to first token, with its waits while it was refused."""

    ttft_s: float
    sent_s: float
    """Since its phase began."""

    trace_id: str
    clock_s: float
    """When it was sent, by the clock of `ProcessorWaits`."""


@dataclass
class PhaseFigures:
    """The probes, and what the engine generated meanwhile."""

    probes: list[Probe] = field(default_factory=list)
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Those of prompts that no cache had."""
    seconds: float = 0.0
    engine: list[str] = field(default_factory=list)
    """The engine's own histograms of each phase."""

    @property
    def ttft_s(self) -> list[float]:
        """The times to first token."""
        return [probe.ttft_s for probe in self.probes]


class FloodedFleet:
    """A fleet of one node, and the keys of two tenants."""

    def __init__(
        self,
        fleet: Fleet,
        target: FloodTarget,
        http: aiohttp.ClientSession,
        collector: Collector,
        *,
        flood_tokens: int,
    ) -> None:
        self._fleet = fleet
        self._target = target
        self._http = http
        self._collector = collector
        self._flood_tokens = flood_tokens
        self._number = 0
        self.flood_statuses: Counter[int] = Counter()
        self.probes_refused = 0
        self.keys: dict[str, str] = {}

    async def start(self) -> None:
        """Start one scheduler, one node and one router, and deploy the model."""
        fleet = self._fleet
        traces = {"traces_endpoint": self._collector.url}
        fleet.settings[f"node-{POP}"] = {**self._target.node_settings, **traces}
        fleet.settings[f"router-{POP}"] = traces
        await fleet.start_postgres()
        await fleet.start_scheduler("a")
        await until("the scheduler is active", fleet.acts)
        country, latitude, longitude = CITIES[POP]
        body = {"city": POP, "country": country, "latitude": latitude, "longitude": longitude}
        await fleet.ask("PUT", f"/v1/pops/{POP}", body)
        await fleet.start_node(POP)
        await fleet.start_router(POP)
        await fleet.ask("PUT", f"/v1/models/{self._target.model_id}", self._target.model)
        await fleet.ask("POST", "/v1/deployments", self._target.deployment)
        await until("the model is warm", lambda: fleet.is_warm(1), READY_S)
        for name, tenant in (("flood", "flood"), (OTHER_TENANT, "small"), (SAME_TENANT, "flood")):
            made = await fleet.ask("POST", "/v1/keys", {"tenant_id": tenant})
            self.keys[name] = made["key"]
        await fleet.routers_know()
        await until("the model answers", self._answers)

    async def _answers(self) -> bool:
        """Return True if each key gets an answer."""
        for key in self.keys.values():
            async with self._post(key, "Hello.", 1) as response:
                await response.read()
                if response.status != 200:
                    return False
        return True

    async def probe(self, key: str, phase_began_s: float = 0.0) -> Probe:
        """Send a short request until it is served."""
        self._number += 1
        prompt = f"What is the number after {self._number}?"
        trace_id = uuid4().hex
        sent = {TRACEPARENT: f"00-{trace_id}-{uuid4().hex[:16]}-01"}
        began_s = time.perf_counter()
        took_s = 0.0
        while not took_s:
            async with self._post(key, prompt, PROBE_TOKENS, sent) as response:
                if response.status != 429:
                    response.raise_for_status()
                async for line in response.content:
                    took_s = took_s or (has_text(line) and time.perf_counter() - began_s)
            if response.status == 429:
                self.probes_refused += 1
                await asyncio.sleep(REFUSED_PAUSE_S)
            elif not took_s:
                raise RuntimeError("cannot measure: the answer has no text")
        return Probe(took_s, began_s - phase_began_s, trace_id, began_s)

    async def flood(self, *, sessions: bool) -> None:
        """Keep one request open without end, and retry soon when it is refused."""
        while True:
            sent = {SESSION_AFFINITY: uuid4().hex} if sessions else {}
            prompt = f"Tell me a long story about {uuid4().hex}."
            fields = {"ignore_eos": True}
            tokens = self._flood_tokens
            async with self._post(self.keys["flood"], prompt, tokens, sent, fields) as response:
                await response.read()
            self.flood_statuses[response.status] += 1
            if response.status != 200:
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def measure(self, found: PhaseFigures, name: str, seconds: float) -> None:
        """Send probes at fixed times for some seconds; count what the engine computes meanwhile."""
        histograms = await self.histograms()
        before, began_s = await self.stats(), time.perf_counter()
        probes: list[asyncio.Task[Probe]] = []
        while (passed_s := time.perf_counter() - began_s) < seconds:
            if name != NO_PROBES and passed_s >= len(probes) * PROBE_EVERY_S:
                probes.append(asyncio.create_task(self.probe(self.keys[name], began_s)))
            await asyncio.sleep(PROBE_EVERY_S / 20)
        after = await self.stats()
        found.seconds += time.perf_counter() - began_s
        found.generated_tokens += after.tokens_out_total - before.tokens_out_total
        found.prompt_tokens += computed_prompts(after) - computed_prompts(before)
        found.engine.append(describe(histograms, await self.histograms()))
        found.probes += await asyncio.gather(*probes)

    def waits_of(self, probe: Probe) -> str:
        """Return where a probe waited, from the spans that came of it."""
        spans = [span for span in self._collector.spans if span.trace == probe.trace_id]
        waited_s = {
            place: sum(
                (span.span.end_time_unix_nano - span.span.start_time_unix_nano) / 1e9
                for span in spans
                if span.name == name
            )
            for place, name in WAITS.items()
        }
        sent, arrived = (
            [span.span.start_time_unix_nano / 1e9 for span in spans if span.name == name]
            for name in ("attempt", "serve")
        )
        if len(sent) == len(arrived):
            waited_s["from the router to the node"] = sum(arrived) - sum(sent)
        in_router_s = sum(
            span.attributes.get(names.FIRST_CHUNK_S, 0.0)
            for span in spans
            if names.ROUTER_POP in span.attributes
        )
        waited_s["in the engine and on the way back"] = in_router_s - sum(waited_s.values())
        waited_s["outside the router"] = probe.ttft_s - in_router_s
        return ", ".join(f"{seconds:.3f} s {place}" for place, seconds in waited_s.items())

    def processes(self) -> dict[str, int]:
        """Return the pids of the processes that a request passes."""
        pids = {name: self._fleet.processes.pid(f"{name}-{POP}") for name in ("router", "node")}
        engine = pids["engine"] = self._fleet.engine_pids()[f"node-{POP}"]
        if child := first_child(engine):
            pids["engine's child"] = child
        return pids

    async def stats(self) -> EngineStats:
        """Return the engine's own counts."""
        async with self._engine() as engine:
            stats: EngineStats = await until("the engine counts its tokens", engine.stats)
        return stats

    async def histograms(self) -> Counts:
        """Return the engine's own histograms."""
        async with self._engine() as engine:
            return read_histograms(await engine.metrics())

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[EngineProcess]:
        (path,) = Path(self._fleet.folder, f"node-{POP}", "engines").glob("*/process.json")
        record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
        engine = EngineProcess(record, Path("/nonexistent"), None)
        try:
            yield engine
        finally:
            await engine.release()

    def _post(
        self,
        key: str,
        prompt: str,
        tokens: int,
        sent: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Any:
        body = {
            "model": self._target.model_id,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "stream": True,
            **(fields or {}),
        }
        url = f"{self._fleet.endpoint(POP)}/v1/chat/completions"
        headers = {"authorization": f"Bearer {key}", **(sent or {})}
        return self._http.post(url, json=body, headers=headers)


def computed_prompts(stats: EngineStats) -> int:
    """Return how many tokens of prompts an engine has computed."""
    return stats.prompt_tokens_total - stats.prefix_hit_tokens_total


def has_text(line: bytes) -> bool:
    """Return True if a line of the stream has text of the answer."""
    if not line.startswith(b"data: {"):
        return False
    choices = msgspec.json.decode(line[6:]).get("choices", ())
    return any(choice["delta"].get("content") for choice in choices)


async def run(given: argparse.Namespace) -> None:
    """Probe alone, then in alternating phases beside the flood, and print the table."""
    found = {name: PhaseFigures() for name in ("alone", *PHASES)}
    target = TARGETS[given.engine](POP)
    if given.threads:
        settings = {**target.node_settings, "engine_threads": given.threads}
        target = target._replace(node_settings=settings)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        a_collector() as collector,
        a_fleet(comes_up=False, in_memory=given.engine != "vllm") as fleet,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
    ):
        flooded = FloodedFleet(fleet, target, http, collector, flood_tokens=given.flood_tokens)
        await flooded.start()
        for _ in range(PROBES_TO_WARM_UP):
            await flooded.probe(flooded.keys[OTHER_TENANT])
        for _ in range(PROBES_ALONE):
            found["alone"].probes.append(await flooded.probe(flooded.keys[OTHER_TENANT]))
            await asyncio.sleep(PROBE_EVERY_S / 6)
        waits = ProcessorWaits(flooded.processes())
        flooding = [
            asyncio.create_task(flooded.flood(sessions=given.sessions))
            for _ in range(given.clients)
        ]
        sampling = asyncio.create_task(waits.run())
        try:
            await asyncio.sleep(WARM_UP_S)
            for _ in range(given.rounds):
                for name in PHASES:
                    await flooded.measure(found[name], name, given.seconds)
                    await asyncio.sleep(SETTLE_S)
            if ended := [task for task in flooding if task.done()]:
                await asyncio.gather(*ended)
        finally:
            for task in (*flooding, sampling):
                task.cancel()
            await asyncio.gather(*flooding, sampling, return_exceptions=True)
        await asyncio.sleep(EXPORTED_S)
        slowest = sorted(found[OTHER_TENANT].probes, reverse=True)[:SLOWEST]
        slow = [
            f"- {probe.ttft_s:.3f} s, sent at {probe.sent_s:.1f} s: {flooded.waits_of(probe)}"
            f"{described(waits, probe)}"
            for probe in slowest
        ]
    print(
        f"{given.engine}, {given.clients} clients, answers of {given.flood_tokens} tokens;", end=""
    )
    print(f" its statuses {dict(flooded.flood_statuses)}, {flooded.probes_refused} probes refused")
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print("\n".join(table(found)))
    print("\n".join(["\nslowest of another tenant:", *slow]))
    for phase in filter(None, found[OTHER_TENANT].engine):
        print(f"\nvLLM beside it: {phase}")


def table(found: Mapping[str, PhaseFigures]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| probes beside the flood | | TTFT p50 | p99 | of alone, p50 | p99"
        " | generated tokens/s | computed tokens of prompts/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone_s = found["alone"].ttft_s
    for name, figures in found.items():
        times = " | | | "
        if figures.probes:
            p50_s, p99_s = (percentile(figures.ttft_s, share) for share in (0.5, 0.99))
            times = (
                f"{p50_s:.3f} s | {p99_s:.3f} s | {p50_s / percentile(alone_s, 0.5):.1f}x"
                f" | {p99_s / percentile(alone_s, 0.99):.1f}x"
            )
        rates = " | "
        if figures.seconds:
            generated, prompts = figures.generated_tokens, figures.prompt_tokens
            rates = f"{generated / figures.seconds:.1f} | {prompts / figures.seconds:.1f}"
        lines.append(f"| {name} | {len(figures.ttft_s)} | {times} | {rates} |")
    return lines


def described(waits: ProcessorWaits, probe: Probe) -> str:
    """Return how long each process computed and waited for a processor during a probe."""
    found = waits.between(probe.clock_s, probe.clock_s + probe.ttft_s)
    return "".join(
        f"; {name} computed {had.computed_s:.3f} s, waited for a processor {had.waited_s:.3f} s"
        for name, had in found.items()
    )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=tuple(TARGETS), default="embedded")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=45.0, help="of a phase")
    parser.add_argument("--flood-tokens", type=int, default=64)
    parser.add_argument("--sessions", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: its default")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
