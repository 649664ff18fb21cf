"""Four replicas of a PoP that share KV, against affinity alone and against one large cache.

    python -m ops.bench.pop_kv [MODEL.gguf] [--data FOLDER] [--requests N] [--load SHARE]
        [--device-share CORES]

Each replica is an embedded engine of one thread on a node of its own. With `--device-share` it has
that share of a core and no more (ops/bench/device_shares.py). The requests are whole
sessions of several turns of the Mooncake conversation trace, scaled down to the model, and arrive
so fast that what is not in one large cache, and all answers, take `--load` of what the engines can
compute together; both rates are measured first, with all replicas at work.
Three choices get the same requests at the same times:

- affinity: each session goes to the replica that the hash of its name gives it;
- our choice, without sharing;
- our choice, with sharing: any replica may fetch a prefix from another, as the router names them.

The router's own code decides, fed with the answers of these nodes. `one cache` is not run: it is
the hits of the same requests, in their order, in one LRU cache with the memory of all replicas.
"""

import argparse
import asyncio
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.http import headers
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.kv.kv_sharing import (
    FETCH_MS,
    KV_FOUND,
    KV_HOLDERS,
    KV_KEEPER,
    LOCATE_PATH,
    BlockQuery,
    FoundTokens,
    LocatedBlocks,
    parse_found,
)
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence
from nodeagent.engine.scheduler.sequence import StopConditions
from ops.bench.device_shares import device_shares
from ops.bench.disaggregation import TRACE, bundled_model
from ops.bench.disaggregation_load import ask, random_request
from ops.bench.engine_node import SECRET, NodeClient, NodeSetup, bench_node
from ops.bench.pop_kv_causes import (
    CAUSES,
    LostPrefix,
    OneCache,
    SentPrefix,
    format_losses,
    sent_prefix,
)
from ops.bench.pop_kv_requests import (
    BLOCK_TOKENS,
    SharedRequest,
    chain_keys,
    one_cache_hits,
    read_requests,
    turns_by_session,
)
from ops.bench.pop_kv_router import (
    CONTEXT_TOKENS,
    POLICIES,
    ChosenReplica,
    PopRouter,
    ReplicaAddress,
)
from ops.sim import data
from ops.sim.measure import percentile

NAMES: Final = ("a", "b", "c", "d")
KV_MEMORY_BYTES: Final = 128 * 1024**2
WARM_TOKENS: Final = 1000
DECODE_TOKENS: Final = 32
STREAMS: Final = 4
PROBE_S: Final = 1.0
SAMPLE_S: Final = 0.1
RETRY_S: Final = 0.05


class SharedAnswer(NamedTuple):
    """The times of one answer as a client saw them, and the places of its cached prompt."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    found: FoundTokens
    lost: LostPrefix


class MeasuredRates(NamedTuple):
    """The rates of one replica in a second: prompts, and the answers of STREAMS streams."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class PopClients:
    """The clients of the PoP: they send what its router decides, and tell it the answers."""

    def __init__(
        self, nodes: Sequence[NodeClient], policy: str, rate: float, one_cache: OneCache
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._policy = policy
        self._one_cache = one_cache
        addresses = [ReplicaAddress(node.name, node.address) for node in nodes]
        self.router = PopRouter(addresses, policy, rate, time.monotonic)

    async def ask(self, shared: SharedRequest) -> SharedAnswer:
        """Send a request, again while it is refused; learn from the answer."""
        held = await self._held_blocks(shared)
        in_one_cache = self._one_cache.use(chain_keys(shared.request.prompt))
        began_s, refusals = time.monotonic(), 0
        while True:
            chosen = self.router.choose(shared, refusals)
            if chosen is not None:
                named = [peer.replica_id for peer in chosen.peers.replicas]
                here = chosen.ranked.route.replica_id
                prefix = sent_prefix(in_one_cache, held, here, named)
                answer = await self._attempt(shared, chosen, began_s, prefix)
                if answer is not None:
                    return answer
                refusals += 1
            await asyncio.sleep(RETRY_S)

    async def _attempt(
        self, shared: SharedRequest, chosen: ChosenReplica, began_s: float, prefix: SentPrefix
    ) -> SharedAnswer | None:
        request, router = shared.request, self.router
        sent = router.send(shared, chosen)
        cached, ttft_s = 0, 0.0
        node = self._nodes[sent.route.replica_id]
        body = {
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        fields = self._headers(shared, chosen)
        try:
            async with node.http.post("/v1/completions", json=body, headers=fields) as response:
                load = headers.parse_load(response.headers.get(headers.LOAD, ""))
                if response.status == 429:
                    router.record_refused(sent, load)
                    return None
                if response.status != 200:
                    raise SystemExit(f"cannot measure: {response.status} {await response.text()}")
                found = parse_found(response.headers.get(KV_FOUND, ""))
                waited_ms = int(response.headers.get(FETCH_MS, "0"))
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = msgspec.json.decode(line[6:])
                    if event.get("choices") and not ttft_s:
                        ttft_s = time.monotonic() - began_s
                        router.record_first_token(sent, load)
                    if usage := event.get("usage"):
                        cached = usage["prompt_tokens_details"]["cached_tokens"]
        finally:
            router.close(sent)
        router.learn(sent, cached, waited_ms)
        fetched = (found.peer + found.store) // BLOCK_TOKENS
        lost = prefix.lost(fetched, cached // BLOCK_TOKENS)
        return SharedAnswer(ttft_s, sent.tokens, cached, found, lost)

    async def _held_blocks(self, shared: SharedRequest) -> dict[str, int]:
        """Ask each replica how many blocks of the prompt's prefix it has."""
        prompt = shared.request.prompt
        salt = SECRET.salt_of(self._policy).encode()
        chain = TokenSequence(0, prompt, StopConditions(1, frozenset()), salt).block_digests(
            max(1, (len(prompt) - 1) // BLOCK_TOKENS)
        )
        query = msgspec.msgpack.encode(BlockQuery(digests=tuple(chain)))

        async def ask_one(node: NodeClient) -> int:
            fields = {headers.REPLICA: node.name}
            async with node.http.post(LOCATE_PATH, data=query, headers=fields) as answer:
                return msgspec.json.decode(await answer.read(), type=LocatedBlocks).blocks

        counts = await asyncio.gather(*map(ask_one, self._nodes.values()))
        return dict(zip(self._nodes, counts, strict=True))

    def _headers(self, shared: SharedRequest, chosen: ChosenReplica) -> dict[str, str]:
        """Return what a router sends with the request; queues are not limited with affinity."""
        ranked = chosen.ranked
        fields = {
            headers.REPLICA: str(ranked.route.replica_id),
            headers.CACHE_SALT: self._policy,
            headers.TOKENS: f"p={len(shared.request.prompt)};o={shared.request.output_tokens}",
            headers.PENDING_PREFILL_TOKENS: str(ranked.pending_prefill_tokens),
            headers.PREFILL_MS: str(round(ranked.prefill_ms)),
            headers.ROUTER: "bench",
        }
        if chosen.peers.replicas:
            fields[KV_HOLDERS] = format_peer_replicas(chosen.peers.replicas)
            if chosen.peers.keeper:
                fields[KV_KEEPER] = chosen.peers.keeper
        return fields

    async def probe(self) -> None:
        """Read the loads of all nodes every second, and sample the tokens in flight."""
        next_probe_s = 0.0
        while True:
            self.router.sample()
            if time.monotonic() >= next_probe_s:
                next_probe_s = time.monotonic() + PROBE_S
                for node in self._nodes.values():
                    await self._ping(node)
            await asyncio.sleep(SAMPLE_S)

    async def _ping(self, node: NodeClient) -> None:
        async with node.http.get("/ping", headers={headers.ROUTER: "bench"}) as answer:
            loads = headers.parse_loads(answer.headers.get(headers.LOADS, ""))
        self.router.record_loads(node.name, loads)


@asynccontextmanager
async def replicas(model: Path, device_share: float) -> AsyncIterator[list[NodeClient]]:
    """Run the nodes; yield them when they are warm, limited to `device_share` unless it is 0."""
    options = {"interval_ms": "50", "draft_tokens_max": "0", "kv_dtype": "bf16"}
    with tempfile.TemporaryDirectory(prefix="pop") as folder:
        async with AsyncExitStack() as stack:
            nodes = []
            for name in NAMES:
                setup = NodeSetup(
                    name=name,
                    model=str(model),
                    folder=f"{folder}/{name}",
                    kv_memory_bytes=KV_MEMORY_BYTES,
                    context_tokens=CONTEXT_TOKENS,
                    share_kv=True,
                    options=options,
                )
                nodes.append(await stack.enter_async_context(bench_node(setup)))
            if device_share:
                pids = [node.pid for node in nodes]
                stack.enter_context(device_shares(pids, device_share))
            yield nodes


async def measure_rates(nodes: Sequence[NodeClient], seed: int) -> MeasuredRates:
    """Return the rates of one replica while all of them work."""
    prefill_s = await busy_s(nodes, seed, WARM_TOKENS, 1, 1)
    decode_s = await busy_s(nodes, seed + 500, BLOCK_TOKENS, DECODE_TOKENS, STREAMS)
    return MeasuredRates(WARM_TOKENS / prefill_s, DECODE_TOKENS * STREAMS / decode_s)


async def busy_s(
    nodes: Sequence[NodeClient], seed: int, prompt_tokens: int, output_tokens: int, streams: int
) -> float:
    """Return how long the replicas take for so many new requests each, all at once."""
    began_s = time.monotonic()
    requests = [
        ask(node, random_request(seed + number, prompt_tokens, output_tokens), "warm", 1000)
        for number, node in enumerate([*nodes] * streams)
    ]
    await asyncio.gather(*requests)
    return time.monotonic() - began_s


async def run_policy(
    nodes: Sequence[NodeClient],
    requests: Sequence[SharedRequest],
    policy: str,
    rate: float,
    speed: float,
    blocks: int,
) -> tuple[list[SharedAnswer], float]:
    """Send all requests at their times; return the answers, and tokens in flight max / mean.

    A client sends the next request of a session after the answer to the one before.
    """
    clients = PopClients(nodes, policy, rate, OneCache(blocks * len(nodes)))
    probing = asyncio.create_task(clients.probe())
    began_s = time.monotonic()

    async def have_session(turns: Sequence[SharedRequest]) -> list[SharedAnswer]:
        answers = []
        for shared in turns:
            due_s = began_s + shared.request.at_s / speed
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            answers.append(await clients.ask(shared))
        return answers

    sessions = turns_by_session(requests)
    try:
        answered = await asyncio.gather(*[have_session(turns) for turns in sessions])
    finally:
        probing.cancel()
        with suppress(asyncio.CancelledError):
            await probing
    return [answer for answers in answered for answer in answers], clients.router.balance()


async def kv_blocks(node: NodeClient) -> int:
    """Return how many blocks a replica's KV memory has."""
    found = await node.counters("isochrone_engine_kv_blocks_total")
    return int(max(found.values(), default=0))


async def sharing_counters(nodes: Sequence[NodeClient]) -> dict[str, float]:
    """Return what all nodes together fetched and copied, and why not."""
    prefix, total = "isochrone_node_kv_", defaultdict[str, float](float)
    for node in nodes:
        for name, value in (await node.counters(prefix)).items():
            if "_bucket" not in name and "_created" not in name:
                total[name.removeprefix(prefix)] += value
    return dict(total)


async def measure(arguments: argparse.Namespace) -> None:
    """Run all policies, and print the table."""
    requests = read_requests(data.folder(arguments.data) / TRACE, arguments.requests)
    async with replicas(arguments.model, arguments.device_share) as nodes:
        await measure_rates(nodes, 1000)
        rate, decode_rate = await measure_rates(nodes, 2000)
        blocks = arguments.kv_blocks or await kv_blocks(nodes[0])
        ideal = one_cache_hits(requests, blocks * len(nodes))
        prompt = sum(len(shared.request.prompt) for shared in requests)
        outputs = sum(shared.request.output_tokens for shared in requests)
        busy_s = prompt * (1 - ideal) / rate + outputs / decode_rate
        wanted_s = busy_s / len(nodes) / arguments.load
        speed = max(1e-9, requests[-1].request.at_s) / wanted_s
        print(
            f"{platform.machine()}, Python {platform.python_version()}, torch"
            f" {metadata.version('torch')}, {arguments.model.name}; {len(requests)} requests of"
            f" {prompt / len(requests):.0f} prompt and {outputs / len(requests):.0f} output tokens"
            f" on average in {wanted_s:.0f} s, load {arguments.load:g}; {len(nodes)} replicas of"
            f" {rate:.0f} prompt tokens/s, {decode_rate:.0f} output tokens/s and"
            f" {blocks} blocks\n"
        )
        print(
            "| choice | hits % | found on device, at a peer, in the copy %"
            f" | {' % | '.join(CAUSES)} % | TTFT p50 ms | p90 | tokens in flight max/mean |\n"
            f"|{'---|' * (6 + len(CAUSES))}\n"
            f"| one cache of {blocks * len(nodes)} blocks | {100 * ideal:.1f}"
            f" |{' |' * (4 + len(CAUSES))}",
            flush=True,
        )
        moved: list[str] = []
        for policy in arguments.policy:
            before = await sharing_counters(nodes)
            answers, balance = await run_policy(nodes, requests, policy, rate, speed, blocks)
            print_row(policy, answers, balance)
            after = await sharing_counters(nodes)
            counts = {name: after[name] - before.get(name, 0.0) for name in sorted(after)}
            moved += [f"{policy}: {name} {count:g}" for name, count in counts.items() if count]
        print("\n" + "\n".join(moved))


def print_row(policy: str, answers: Sequence[SharedAnswer], balance: float) -> None:
    """Print the figures of one policy."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    ttft_ms = [1000 * answer.ttft_s for answer in answers]
    places = [
        100 * sum(getattr(answer.found, place) for answer in answers) / prompt
        for place in ("device", "peer", "store")
    ]
    print(
        f"| {policy} | {100 * sum(answer.cached_tokens for answer in answers) / prompt:.1f} "
        f"| {', '.join(f'{place:.1f}' for place in places)} "
        f"| {format_losses([answer.lost for answer in answers], prompt / BLOCK_TOKENS)} "
        f"| {percentile(ttft_ms, 0.5):.0f} "
        f"| {percentile(ttft_ms, 0.9):.0f} | {balance:.2f} |",
        flush=True,
    )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.pop_kv")
    parser.add_argument("model", type=Path, nargs="?", default=None)
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--policy", nargs="*", choices=POLICIES, default=POLICIES)
    parser.add_argument("--kv-blocks", type=int, default=0, help="of a replica, if not reported")
    parser.add_argument("--device-share", type=float, default=0.0, help="of a core; 0: no limit")
    arguments = parser.parse_args()
    arguments.model = arguments.model or bundled_model()
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
