"""Let the clients of fifty thousand requests with two legs leave: do the agents keep anything?

    python -m ops.attack.leaving_clients [--count 50000] [--seed 1]

Two nodes have an embedded engine of a tiny model each: one reads the prompts, the other answers.
This program is the router. Each client leaves at a stage drawn from the seed: once its request is
sent, once its prompt is read elsewhere, with the head of the answer, in mid-stream, or at the end.
Prompts are new, and tenants many. The table shows after each tenth what both agents have:

- rss: resident memory, and of it anon, the process's own, and shmem, windows shared with engines;
- malloc: bytes that are in use, and those that are free between them;
- blocks, objects: what the interpreter has in use, and what its garbage collector tracks;
- tasks and descriptors.

The types whose objects have become more follow. The run fails if tokens or blocks are still held
at a tenth, or if the own memory of an agent grows by more than GROWTH_BYTES_MAX after the first
two tenths. The table that one run printed is in two_leg_kills.md.
"""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from ops.attack.kills import AttackFailed
from ops.attack.often import (
    FREE_S,
    PAUSE_S_MAX,
    do_often,
    in_mib,
    post_bytes,
    print_head,
    print_row,
    run_attack,
)
from ops.bench import memory_counts
from ops.bench.engine_node import NodeClient, NodeSetup, bench_node
from ops.bench.memory_counts import MemoryCounts, ProcessSizes, process_sizes
from ops.golden import tiny

PROMPT_TOKENS: Final = 49
"""Three blocks and a token."""

OUTPUT_TOKENS: Final = 8
TENANTS: Final = 10_000
STREAMED_SHARE: Final = 0.8
KV_MEMORY_BYTES: Final = 1024**2
GROWTH_BYTES_MAX: Final = 4 * 1024**2
SHOWN_TYPES: Final = 12
HEAD: Final = (
    *("left", "agent of", "rss MiB", "anon", "shmem", "malloc used", "malloc free"),
    *("blocks", "objects", "tasks", "descriptors"),
)


class LeaveStage(StrEnum):
    """The progress of a request when its client leaves."""

    SENT = "sent"
    READING = "reading"
    ANSWERED = "answered"
    STREAMING = "streaming"
    WHOLE = "whole"


class AgentState(NamedTuple):
    """What an agent has."""

    sizes: ProcessSizes
    counts: MemoryCounts

    def cells(self) -> Sequence[object]:
        """Return its columns."""
        sizes, counts = self.sizes, self.counts
        in_bytes = (sizes.rss, sizes.anon, sizes.shmem, counts.malloc_used, counts.malloc_free)
        objects = sum(counts.objects.values())
        numbers = (counts.blocks, objects, counts.tasks, sizes.descriptors)
        return (*map(in_mib, in_bytes), *numbers)


async def agent_state(node: NodeClient) -> AgentState:
    """Return what an agent has now."""
    async with node.http.get(memory_counts.PATH) as answer:
        counts = msgspec.json.decode(await answer.read(), type=MemoryCounts)
    return AgentState(process_sizes(node.pid), counts)


class LeavingClients:
    """The clients, and the nodes that they leave."""

    def __init__(self, reader: NodeClient, decoder: NodeClient, seed: int) -> None:
        self.nodes = (decoder, reader)
        self._chance = random.Random(seed)
        peers = [
            # The one that answers is said to be slow at reading.
            PeerReplica(ReplicaId(n.name), NodeId(n.address), n.address, PROMPT_TOKENS, ms, us)
            for n, ms, us in ((decoder, 4000, 20_000), (reader, 20, 100))
        ]
        self._readers = format_peer_replicas(peers)
        self.reached = dict.fromkeys(LeaveStage, 0)

    def _request(self, *, is_streamed: bool) -> bytes:
        """Return a request as a router sends it."""
        chance = self._chance
        body = {
            "prompt": [1 + chance.randrange(60) for _ in range(PROMPT_TOKENS)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": is_streamed,
        }
        fields = {
            "connection": "close",
            headers.REPLICA: self.nodes[0].name,
            headers.ROUTER: f"router-{chance.randrange(400)}",
            headers.REQUEST_ID: f"{chance.getrandbits(128):032x}",
            headers.CACHE_SALT: f"t{chance.randrange(TENANTS)}",
            headers.TOKENS: f"p={PROMPT_TOKENS};o={OUTPUT_TOKENS}",
            headers.PENDING_PREFILL_TOKENS: str(PROMPT_TOKENS),
            headers.PREFILL_MS: "4000",
            headers.PREFILL_REPLICAS: self._readers,
        }
        return post_bytes("/v1/completions", fields, msgspec.json.encode(body))

    async def leave(self, stage: LeaveStage) -> None:
        """Send a request, and leave at a stage."""
        chance = self._chance
        host, _, port = self.nodes[0].address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        is_streamed = chance.random() < STREAMED_SHARE
        try:
            writer.write(self._request(is_streamed=is_streamed))
            # An answer may be over before.
            with suppress(asyncio.IncompleteReadError):
                await self._reach(stage, reader)
                self.reached[stage] += 1
            await asyncio.sleep(chance.uniform(0, PAUSE_S_MAX))
        finally:
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

    async def _reach(self, stage: LeaveStage, reader: asyncio.StreamReader) -> None:
        if stage is LeaveStage.SENT:
            return
        await reader.readuntil(b"\r\n\r\n")
        if stage is LeaveStage.READING:
            return
        if stage is LeaveStage.WHOLE:
            await reader.read()
            return
        await reader.readuntil(b"HTTP/1.1 200 OK\r\n")
        if stage is LeaveStage.STREAMING:
            for _ in range(self._chance.randrange(1, OUTPUT_TOKENS)):
                await reader.readuntil(b"data: ")

    async def leave_often(self, count: int) -> None:
        """Leave `count` times."""
        await do_often(count, list(LeaveStage), self._chance, self.leave)
        async with asyncio.timeout(FREE_S):
            while await self._held():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _held(self) -> float:
        """Return the tokens, requests and blocks that the nodes hold."""
        held = 0.0
        for node in self.nodes:
            async with node.http.get("/ping") as answer:
                loads = headers.parse_loads(answer.headers[headers.LOADS])
            load = loads[ReplicaId(node.name)]
            held += load.prefill_tokens + load.decode_tokens + load.running
            for name in ("kv_transfer_held_blocks", "kv_transfers_waiting", "kv_blocks_used"):
                held += sum((await node.counters(f"isochrone_engine_{name}")).values())
        return held


def grown_types(first: AgentState, last: AgentState) -> Sequence[str]:
    """Return the types of which there are most more objects."""
    before, after = first.counts.objects, last.counts.objects
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    most = sorted(grown, key=lambda name: -grown[name])[:SHOWN_TYPES]
    return [f"{name} {grown[name]:+}" for name in most if grown[name] > 0]


def a_node(folder: Path, name: str) -> NodeSetup:
    """Return a node with the model in `folder`."""
    return NodeSetup(
        name=name,
        model=str(folder / "model"),
        folder=str(folder / name),
        kv_memory_bytes=KV_MEMORY_BYTES,
        context_tokens=256,
        pause_s=0.05,
        has_equal_priority=True,
        counts_memory=True,
        options={"batch_tokens_max": "64"},
    )


async def attack(count: int, seed: int) -> None:
    """Have `count` clients leave, and print the table. Raises AttackFailed."""
    with tempfile.TemporaryDirectory(prefix="leave") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        tiny.write_folder(folder / "model", "qwen3")
        tiny.write_tokenizer(folder / "model")
        async with (
            bench_node(a_node(folder, "p")) as reader,
            bench_node(a_node(folder, "d")) as decoder,
        ):
            await _leave_and_print(LeavingClients(reader, decoder, seed), count)


async def _leave_and_print(clients: LeavingClients, count: int) -> None:
    print_head(*HEAD)
    states: dict[str, list[AgentState]] = {node.name: [] for node in clients.nodes}
    for tenth in range(1, 11):
        await clients.leave_often(count // 10)
        for node in clients.nodes:
            state = await agent_state(node)
            states[node.name].append(state)
            print_row(tenth * (count // 10), node.name, *state.cells())
    print("\n" + ", ".join(f"{stage} {times}" for stage, times in clients.reached.items()))
    print(await clients.nodes[0].counters("isochrone_node_prefill_legs_total"))
    for name, of_node in states.items():
        print(f"{name}: {', '.join(grown_types(of_node[1], of_node[-1]))}")
        grown = of_node[-1].sizes.anon - of_node[1].sizes.anon
        if grown > GROWTH_BYTES_MAX:
            raise AttackFailed(f"the agent of {name} has {grown} bytes more")


if __name__ == "__main__":
    raise SystemExit(run_attack("ops.attack.leaving_clients", 50_000, attack))
