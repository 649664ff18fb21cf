"""Requests of the disaggregation benchmark: read from a trace, sent at their times, timed."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from ops.bench.engine_node import NodeClient
from ops.bench.streamed_answer import stream_frames
from ops.sim.traces import MOONCAKE_BLOCK, TraceSlice, mooncake

PROMPT_TOKENS_MAX: Final = 1800
OUTPUT_TOKENS_MAX: Final = 240
VOCABULARY: Final = 40_000
RETRY_S: Final = 0.05


class MixScale(NamedTuple):
    """The divisors of the trace's prompts and outputs."""

    name: str
    prompt: int
    output: int


class BenchRequest(NamedTuple):
    """One request of the trace, scaled."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    blocks: tuple[int, ...]
    """The trace's blocks of the prompt: equal blocks have equal tokens."""


class TimedAnswer(NamedTuple):
    """The times of one answer, as a client saw them."""

    ttft_s: float
    gaps_s: list[float]
    text: str
    ended_s: float


Send = Callable[[BenchRequest], Awaitable[TimedAnswer]]


def read_trace(path: Path, count: int, scale: MixScale) -> list[BenchRequest]:
    """Return the first requests of the trace, scaled; equal blocks have equal tokens."""
    requests: list[BenchRequest] = []
    width = MOONCAKE_BLOCK // scale.prompt
    for row in mooncake(path, TraceSlice(count)):
        tokens = max(16, min(PROMPT_TOKENS_MAX, row.prompt_tokens // scale.prompt))
        prompt: list[int] = []
        for block in (*row.blocks, f"end of {row.number}"):
            chance = random.Random(str(block))
            prompt += [chance.randrange(100, VOCABULARY) for _ in range(max(width, 16))]
        while len(prompt) < tokens:
            prompt.append(chance.randrange(100, VOCABULARY))
        output = max(4, min(OUTPUT_TOKENS_MAX, row.output_tokens // scale.output))
        requests.append(BenchRequest(row.at_s, prompt[:tokens], output, row.blocks))
    return requests


def describe(
    nodes: Sequence[NodeClient], tokens: int, token_us: int, decode_slowness: int = 1
) -> str:
    """Return the header that names the decode replica and the prefill replicas.

    The decode replica is said to read `decode_slowness` times slower than it does.
    """
    here_us = decode_slowness * token_us
    return format_peer_replicas(
        [
            PeerReplica(
                ReplicaId(node.name),
                NodeId(node.address),
                node.address,
                tokens,
                tokens * speed_us // 1000,
                speed_us,
            )
            for node, speed_us in zip(nodes, (here_us, *[token_us] * (len(nodes) - 1)), strict=True)
        ]
    )


async def ask(
    node: NodeClient,
    request: BenchRequest,
    tenant: str,
    token_us: int,
    readers: str = "",
    on_first: Callable[[], object] = lambda: None,
) -> TimedAnswer:
    """Send a request as a router does, and time its tokens. Waits while the node is full."""
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
    began_s = time.monotonic()
    while True:
        times: list[float] = []
        text = ""
        async with node.http.post("/v1/completions", json=body, headers=sent) as response:
            if response.status == 429:
                await asyncio.sleep(RETRY_S)
                continue
            if response.status != 200:
                raise SystemExit(f"cannot measure: {response.status} {await response.text()}")
            async for frame in stream_frames(response.content):
                if choices := frame.get("choices"):
                    if not times:
                        on_first()
                    times.append(time.monotonic())
                    text += choices[0]["text"]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return TimedAnswer(times[0] - began_s, gaps, text, time.monotonic())


class UnifiedRouter:
    """Sends each request to the engine with the least to read, its own prompt included.

    The router knows exactly what each engine has read, and forgets nothing.
    """

    def __init__(self, nodes: Sequence[NodeClient], tenant: str, token_us: int, scale: int) -> None:
        self._nodes = nodes
        self._tenant = tenant
        self._token_us = token_us
        self._block_tokens = max(MOONCAKE_BLOCK // scale, 16)
        self._queued = dict.fromkeys((node.name for node in nodes), 0)
        self._running = dict.fromkeys((node.name for node in nodes), 0)
        self._known: dict[str, set[int]] = {node.name: set() for node in nodes}

    async def send(self, request: BenchRequest) -> TimedAnswer:
        """Send a request to one of the engines."""

        def cost(node: NodeClient) -> tuple[int, int]:
            return self._queued[node.name] + self._uncached(node, request), self._running[node.name]

        node = min(self._nodes, key=cost)
        uncached = self._uncached(node, request)
        self._known[node.name] |= set(request.blocks)
        self._queued[node.name] += uncached
        self._running[node.name] += 1
        is_queued = True

        def release() -> None:
            nonlocal is_queued
            self._queued[node.name] -= uncached if is_queued else 0
            is_queued = False

        try:
            return await ask(node, request, self._tenant, self._token_us, on_first=release)
        finally:
            release()
            self._running[node.name] -= 1

    def _uncached(self, node: NodeClient, request: BenchRequest) -> int:
        known = itertools.takewhile(self._known[node.name].__contains__, request.blocks)
        return max(1, len(request.prompt) - sum(1 for _ in known) * self._block_tokens)


async def run(requests: Sequence[BenchRequest], speed: float, send: Send) -> list[TimedAnswer]:
    """Send all requests at their times, to one setting."""

    async def at_its_time(request: BenchRequest) -> TimedAnswer:
        await asyncio.sleep(request.at_s / speed)
        return await send(request)

    return await asyncio.gather(*[at_its_time(request) for request in requests])


def random_request(seed: int, tokens: int, output_tokens: int) -> BenchRequest:
    """Return a request whose prompt no other request shares, except with the same seed."""
    chance = random.Random(seed)
    prompt = [chance.randrange(100, VOCABULARY) for _ in range(tokens)]
    return BenchRequest(0.0, prompt, output_tokens, ())
