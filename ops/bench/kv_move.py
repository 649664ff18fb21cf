"""Moves cached KV between real engines: of one node, of two nodes, and as a raw copy.

    python -m ops.bench.kv_move [MODEL.gguf] [--rounds N] [--tokens N]

A node has the replicas `d` and `p`, another one `q`; the agents and engines are processes. In each
round `p` and `q` read the same new prompts, `d` fetches one from each, and as many bytes are copied
between two processes over loopback. The time of a fetch is that of the agent: from its request for
the blocks until all of them are on the device of `d`. Without TLS.

The CPU time is that of all engines and of all agents, less that of the same request once its prompt
is cached. Other work on the machine changes it less than the time taken.
"""

import argparse
import asyncio
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import psutil

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing
from ops.bench.disaggregation import bundled_model, raw_copy_s
from ops.bench.disaggregation_load import BenchRequest, ask, random_request
from ops.bench.engine_node import NodeClient, NodeSetup, bench_node
from ops.sim.measure import percentile

TOKEN_US: Final = 20_000
"""The stated time of the receiver for a token, so that a fetch always pays."""

_PROCESS_CLOCK: Final = 2
"""Linux: with a process id, the number of that process's CPU clock."""

PAUSE_S: Final = 1.0
"""Between the end of the sender's work and the transfer."""

SETTINGS: Final = {"p": "two engines of one node, through memory", "q": "two nodes, loopback TCP"}


class CpuTimes(msgspec.Struct, frozen=True):
    """CPU time of a kind of process, in seconds."""

    engines_s: float
    agents_s: float

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Return the difference to an earlier time."""
        return CpuTimes(self.engines_s - before.engines_s, self.agents_s - before.agents_s)


class MovedBlocks(msgspec.Struct, frozen=True):
    """The bytes of one transfer, its time, and the CPU time of its request."""

    count: int
    took_s: float
    cpu: CpuTimes


def cpu_times() -> CpuTimes:
    """Return the CPU time of all engines and agents that this process runs."""
    taken_s = {True: 0.0, False: 0.0}
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.Error):
            is_engine = "nodeagent.engine" in process.cmdline()
            # The clock of a process counts threads that have ended, too.
            taken_s[is_engine] += time.clock_gettime((~process.pid << 3) | _PROCESS_CLOCK)
    return CpuTimes(taken_s[True], taken_s[False])


def holders(node: NodeClient, source: str, address: str, tokens: int) -> str:
    """Return the header that names `d`, and the replica that has the prefix."""
    return format_peer_replicas(
        [
            PeerReplica(
                ReplicaId(name), NodeId(at), at, tokens, tokens * TOKEN_US // 1000, TOKEN_US
            )
            for name, at in (("d", node.address), (source, address))
        ]
    )


async def fetch(
    node: NodeClient, source: str, address: str, request: BenchRequest, tenant: str
) -> MovedBlocks:
    """Have `d` fetch the prefix of a prompt, and answer."""
    tokens = len(request.prompt)
    sent = {
        headers.REPLICA: "d",
        headers.CACHE_SALT: tenant,
        headers.TOKENS: f"p={tokens};o=2",
        headers.PENDING_PREFILL_TOKENS: str(tokens),
        kv_sharing.KV_HOLDERS: holders(node, source, address, tokens),
    }
    body = {"prompt": request.prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    before, cpu_before = await node.counters("isochrone_node_kv_fetch_"), cpu_times()
    async with node.http.post("/v1/completions", json=body, headers=sent) as answer:
        if answer.status != 200:
            raise SystemExit(f"cannot measure: {answer.status} {await answer.text()}")
        await answer.read()
    cpu = cpu_times().since(cpu_before)
    after = await node.counters("isochrone_node_kv_fetch_")

    def grown(name: str) -> float:
        return after[f"isochrone_node_kv_fetch_{name}"] - before[f"isochrone_node_kv_fetch_{name}"]

    return MovedBlocks(int(grown("bytes_total")), grown("seconds_sum"), cpu)


async def measure(model: Path, rounds: int, tokens: int) -> None:
    """Move in turns, and print a row of each setting."""
    options = {"interval_ms": "25", "draft_tokens_max": "0", "kv_dtype": "bf16"}
    with tempfile.TemporaryDirectory(prefix="mv") as folder:
        first, second = (
            NodeSetup(
                name=name,
                model=str(model),
                folder=f"{folder}/{name}",
                options=options,
                share_kv=True,
                others=others,
            )
            for name, others in (("d", ("p",)), ("q", ()))
        )
        took_s: dict[str, list[float]] = {name: [] for name in ("raw", *SETTINGS)}
        cpu: dict[str, list[CpuTimes]] = {name: [] for name in SETTINGS}
        count = 0
        async with bench_node(first) as node, bench_node(second) as other:
            sources = {
                "p": NodeClient(name="p", address=node.address, http=node.http, pid=node.pid),
                "q": other,
            }
            for number in range(rounds + 1):
                for name, source in sources.items():
                    request = random_request(1000 * number + ord(name), tokens, 2)
                    await ask(source, request, "t", 1000)
                    # Threads of torch spin for a while after their last product.
                    await asyncio.sleep(PAUSE_S)
                    moved = await fetch(node, name, source.address, request, "t")
                    if not moved.count:
                        raise SystemExit(f"cannot measure: nothing was fetched from {name}")
                    count = moved.count
                    took_s[name].append(moved.took_s)
                    cached = await fetch(node, name, source.address, request, "t")
                    cpu[name].append(moved.cpu.since(cached.cpu))
                took_s["raw"].append(await asyncio.to_thread(raw_copy_s, count))
                last_ms = {name: round(1000 * taken[-1], 1) for name, taken in took_s.items()}
                print(f"round {number}: {count} bytes, ms {last_ms}", file=sys.stderr, flush=True)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch"
        f" {metadata.version('torch')}, {model.name}, KV in bf16, {count / 1e6:.0f} MB,"
        f" {rounds} rounds"
    )
    print_table(took_s, cpu)


def print_table(took_s: Mapping[str, list[float]], cpu: Mapping[str, list[CpuTimes]]) -> None:
    """Print a row of each setting."""
    print(
        "\n| | best ms | p50 ms | best / raw | p50 / raw | CPU ms of engines, p50 | of agents |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    # The first round allocates memory and connects.
    taken_ms = {name: [1000 * one for one in taken[1:]] for name, taken in took_s.items()}
    raw_ms = min(taken_ms["raw"])
    for name, label in (("raw", "raw copy between two processes"), *SETTINGS.items()):
        best, middle = min(taken_ms[name]), percentile(taken_ms[name], 0.5)
        ratios = f"{best / raw_ms:.2f} | {middle / percentile(taken_ms['raw'], 0.5):.2f}"
        used = cpu.get(name, [])[1:]
        engines_ms, agents_ms = (
            f"{1000 * percentile(each, 0.5):.1f}" if each else ""
            for each in ([one.engines_s for one in used], [one.agents_s for one in used])
        )
        print(f"| {label} | {best:.1f} | {middle:.1f} | {ratios} | {engines_ms} | {agents_ms} |")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.kv_move")
    parser.add_argument("model", type=Path, nargs="?", default=None)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1600)
    arguments = parser.parse_args()
    model = arguments.model or bundled_model()
    asyncio.run(measure(model, arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
