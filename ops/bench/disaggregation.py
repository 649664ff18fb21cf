"""Two engines, unified against one that reads prompts and one that generates, at equal devices.

    python -m ops.bench.disaggregation MODEL.gguf [--data FOLDER] [--requests N] [--load SHARE]

Each engine has one thread and the node's own data plane, in this process. The requests are those of
the Mooncake trace, scaled down to the model: prompts by PROMPT_SCALE, outputs by OUTPUT_SCALE, and
their arrival to a share of what both engines can read. Both settings get the same requests at the
same times. Unified, a request goes to the engine with the fewest tokens in flight.

Then a prompt that is cached at the prefill engine is transferred, and as many bytes are copied
between two processes over loopback.
"""

import argparse
import asyncio
import gzip
import hashlib
import itertools
import json
import multiprocessing
import platform
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from isochrone.service.http_server import serve_http
from isochrone.wire import headers
from isochrone.wire.artifact import manifest_digest
from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.headers import PeerReplica
from isochrone.wire.ids import DeploymentId, DeviceId, ModelId, NodeId, ReplicaId
from isochrone.wire.model import Artifact, ArtifactFile, EngineSettings
from nodeagent import metrics
from nodeagent.api.data_plane import DataPlaneServer
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.config import NodeConfig
from nodeagent.host.artifacts import ArtifactStore
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.engines import EngineProcesses
from nodeagent.host.link import TransferLink
from nodeagent.host.sources import ArtifactSources
from nodeagent.supervisor import Supervisor
from ops.sim import data
from ops.sim.measure import percentile

PROMPT_SCALE: Final = 16
OUTPUT_SCALE: Final = 8
PROMPT_TOKENS_MAX: Final = 1800
TRACE: Final = "traces/mooncake_conversation_trace.jsonl.gz"
TRACE_BLOCK: Final = 512
VOCABULARY: Final = 40_000
NAMES: Final = ("d", "p")
SECRET: Final = CacheSalts(b"a secret of this benchmark......")


class BenchRequest(NamedTuple):
    """One request of the trace, scaled."""

    at_s: float
    prompt: list[int]
    output_tokens: int


class PairedNode(NamedTuple):
    """A node with one engine: its data plane and its rate of reading."""

    name: str
    address: str
    http: aiohttp.ClientSession


class TimedAnswer(NamedTuple):
    """What a client saw of one answer."""

    ttft_s: float
    gaps_s: list[float]
    text: str


def read_trace(path: Path, count: int) -> list[BenchRequest]:
    """Return the first requests of the trace, scaled; equal blocks have equal tokens."""
    requests: list[BenchRequest] = []
    width = TRACE_BLOCK // PROMPT_SCALE
    with gzip.open(path) as lines:
        for line in lines:
            row = json.loads(line)
            prompt: list[int] = []
            for block in row["hash_ids"]:
                chance = random.Random(block)
                prompt += [chance.randrange(100, VOCABULARY) for _ in range(width)]
            prompt = prompt[: max(16, min(PROMPT_TOKENS_MAX, row["input_length"] // PROMPT_SCALE))]
            output = max(4, row["output_length"] // OUTPUT_SCALE)
            requests.append(BenchRequest(row["timestamp"] / 1000, prompt, output))
            if len(requests) == count:
                return requests
    return requests


def a_spec(name: str, model: Path) -> ReplicaSpec:
    """Return the replica of one node."""
    content = model.read_bytes()
    file = ArtifactFile(
        path=model.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    artifact = Artifact(
        source=f"file:{model.parent}", files=(file,), digest=manifest_digest([file])
    )
    return ReplicaSpec(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("bench"),
        version=1,
        name="bench",
        model_id=ModelId("bench"),
        artifact=artifact,
        context_tokens=2048,
        engine=EngineSettings(
            driver="embedded", kv_memory_bytes=600 * 1024**2, tokens_in_flight_max=100_000
        ),
        device_ids=(DeviceId("cpu"),),
        memory_bytes=2 * 1024**3,
    )


@asynccontextmanager
async def a_node(name: str, model: Path, folder: Path) -> AsyncIterator[PairedNode]:
    """Run a node with one warm engine of one thread."""
    config = NodeConfig(name=name, schedulers=(), state=folder, address="")
    supervisor = Supervisor(
        config=config,
        artifacts=ArtifactStore(
            folder / "artifacts",
            ArtifactSources(private=True, hf_url=""),
            1 << 34,
            link=TransferLink(0, time.monotonic),
        ),
        engines=EngineProcesses(folder / "engines", 1),
        clock=time.monotonic,
        rng=random.Random(1),
        on_change=lambda: None,
    )
    app = DataPlaneServer(supervisor, PeerReplicaClient(None, time.monotonic), SECRET).app()
    async with serve_http(app, "127.0.0.1", 0) as port:
        address = f"127.0.0.1:{port}"
        async with aiohttp.ClientSession(f"http://{address}") as http:
            supervisor.start(a_spec(name, model))
            replica = supervisor.replicas[ReplicaId(name)]
            while not replica.is_serving:  # noqa: ASYNC110 - a benchmark may poll
                await asyncio.sleep(0.2)
            try:
                yield PairedNode(name, address, http)
            finally:
                await supervisor.shut_down(keep_engines=False)


def describe(nodes: Sequence[PairedNode], tokens: int, token_us: int) -> str:
    """Return the header that names the decode replica and the prefill replica."""
    return headers.format_peer_replicas(
        [
            PeerReplica(
                ReplicaId(node.name),
                NodeId(node.address),
                node.address,
                tokens,
                tokens * token_us // 1000,
                token_us,
            )
            for node in nodes
        ]
    )


async def ask(
    node: PairedNode, request: BenchRequest, tenant: str, token_us: int, readers: str = ""
) -> TimedAnswer:
    """Send a request as a router does, and time its tokens."""
    tokens = len(request.prompt)
    body = {
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent = {
        headers.REPLICA: node.name,
        headers.CACHE_SALT: tenant,
        headers.TOKENS: f"p={tokens};o={request.output_tokens}",
        headers.PENDING_PREFILL_TOKENS: str(tokens),
        headers.PREFILL_MS: str(tokens * token_us // 1000),
    }
    if readers:
        sent[headers.PREFILL_REPLICAS] = readers
    began_s, times, text = time.monotonic(), [], ""
    async with node.http.post("/v1/completions", json=body, headers=sent) as response:
        if response.status != 200:
            raise SystemExit(f"cannot measure: {response.status} {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choices = msgspec.json.decode(line[6:]).get("choices")
            if choices:
                times.append(time.monotonic())
                text += choices[0]["text"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return TimedAnswer(times[0] - began_s, gaps, text)


async def run(
    nodes: Sequence[PairedNode],
    requests: Sequence[BenchRequest],
    speed: float,
    token_us: int,
    *,
    has_roles: bool,
) -> list[TimedAnswer]:
    """Send all requests at their times, to one setting."""
    in_flight = dict.fromkeys((node.name for node in nodes), 0)
    tenant = f"roles-{has_roles}"

    async def send(request: BenchRequest) -> TimedAnswer:
        await asyncio.sleep(request.at_s / speed)
        tokens = len(request.prompt) + request.output_tokens
        if has_roles:
            readers = describe(nodes, len(request.prompt), token_us)
            return await ask(nodes[0], request, tenant, token_us, readers)
        node = min(nodes, key=lambda node: in_flight[node.name])
        in_flight[node.name] += tokens
        try:
            return await ask(node, request, tenant, token_us)
        finally:
            in_flight[node.name] -= tokens

    return await asyncio.gather(*[send(request) for request in requests])


def print_row(name: str, answers: Sequence[TimedAnswer]) -> None:
    """Print the figures of one setting."""
    gaps = [1000 * gap for answer in answers for gap in answer.gaps_s]
    ttft = [1000 * answer.ttft_s for answer in answers]
    cells = [percentile(gaps, 0.5), percentile(gaps, 0.9), percentile(gaps, 0.99)]
    cells += [percentile(ttft, 0.5), percentile(ttft, 0.9)]
    print(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |", flush=True)


def _send_bytes(port: int, count: int) -> None:
    """Send `count` bytes to a listener of this machine."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(bytes(count))


def raw_copy_s(count: int) -> float:
    """Return how long another process takes to send `count` bytes to this one over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sender = multiprocessing.get_context("fork").Process(target=_send_bytes, args=(port, count))
        sender.start()
        link, _ = server.accept()
        began_s, left, buffer = time.monotonic(), count, bytearray(1 << 20)
        with link:
            while left:
                left -= link.recv_into(buffer)
        took_s = time.monotonic() - began_s
        sender.join()
        return took_s


def transferred() -> tuple[float, float]:
    """Return the bytes and seconds of all transfers so far."""
    samples: dict[str, float] = {}
    for metric in (metrics.KV_TRANSFER_BYTES, metrics.PREFILL_LEG_SECONDS):
        for family in metric.collect():
            samples |= {sample.name: sample.value for sample in family.samples}
    return (
        samples["isochrone_node_kv_transfer_bytes_total"],
        samples["isochrone_node_prefill_leg_seconds_sum"],
    )


async def measure_transfer(nodes: Sequence[PairedNode], token_us: int) -> None:
    """Transfer a prompt that the prefill engine has cached, three times; print the best."""
    chance = random.Random(3)
    best_s, count = float("inf"), 0.0
    for number in range(3):
        prompt = [chance.randrange(100, VOCABULARY) for _ in range(1600)]
        request = BenchRequest(0.0, prompt, 2)
        await ask(nodes[1], request, f"t{number}", token_us)
        before = transferred()
        readers = describe(nodes, len(prompt), 20 * token_us)
        await ask(nodes[0], request, f"t{number}", token_us, readers)
        after = transferred()
        count = after[0] - before[0]
        best_s = min(best_s, after[1] - before[1])
    raw_s = min([await asyncio.to_thread(raw_copy_s, int(count)) for _ in range(3)])
    print(
        f"\ntransfer of {count / 1e6:.0f} MB: {best_s:.3f} s ({count / best_s / 1e6:.0f} MB/s);"
        f" raw copy {raw_s:.3f} s ({count / raw_s / 1e6:.0f} MB/s): {best_s / raw_s:.1f}x"
    )


async def measure(arguments: argparse.Namespace) -> None:
    """Run both settings, and print the table."""
    requests = read_trace(data.folder(arguments.data) / TRACE, arguments.requests)
    with tempfile.TemporaryDirectory(prefix="dis") as name:
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(a_node(node, arguments.model, Path(name) / node))
                for node in NAMES
            ]
            calibration = BenchRequest(0.0, list(range(1000, 2000)), 2)
            took_s = min(
                [
                    (await ask(nodes[0], calibration, f"c{n}", 1000)).ttft_s
                    for n in range(arguments.warmups)
                ]
            )
            token_us = max(1, round(1e6 * took_s / 1000))
            tokens = sum(len(request.prompt) for request in requests)
            wanted_s = tokens * token_us / 1e6 / len(nodes) / arguments.load
            speed = max(1e-9, requests[-1].at_s) / wanted_s
            print(
                f"{platform.machine()}, {len(requests)} requests in {wanted_s:.0f} s,"
                f" {tokens / len(requests):.0f} prompt tokens on average, {1e6 / token_us:.0f}"
                f" prompt tokens/s an engine\n"
            )
            print("| setting | ITL p50 ms | p90 | p99 | TTFT p50 ms | p90 |")
            print("|---|---|---|---|---|---|")
            unified = await run(nodes, requests, speed, token_us, has_roles=False)
            print_row("2 unified", unified)
            split = await run(nodes, requests, speed, token_us, has_roles=True)
            print_row("1 prefill, 1 decode", split)
            same = sum(a.text == b.text for a, b in zip(unified, split, strict=True))
            legs: dict[str, Any] = {
                sample.labels["outcome"]: int(sample.value)
                for family in metrics.PREFILL_LEGS.collect()
                for sample in family.samples
                if sample.name.endswith("_total")
            }
            print(f"\nidentical answers: {same} of {len(requests)}; prefill legs: {legs}")
            await measure_transfer(nodes, token_us)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.disaggregation")
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--warmups", type=int, default=2)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
