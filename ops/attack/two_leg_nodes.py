"""The replicas of ops.attack.two_leg_kills and fetch_kills: one answers, and two others read its
prompts or have their KV.

Agents and engines are processes, with a tiny model, and can be killed.
"""

import asyncio
import math
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import aiohttp
import msgspec

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv.kv_sharing import KV_FOUND, KV_HOLDERS, parse_found
from ops.attack.kills import AttackFailed
from ops.bench.engine_node import WARM_S, NodeSetup
from ops.golden import tiny

DECODE, READERS = "d", ("p1", "p2")
NO_HEADERS: Final[Mapping[str, str]] = {}
PAUSE_S: Final = 0.05
"""Nodes and windows are used again so soon after a failure, to be used at the next instant."""

HEAD_DIM: Final = 256
"""A prompt has 2.4 MB of KV, so that a transfer takes long enough to be hit."""

KV_MEMORY_BYTES: Final = 64 * 1024**2
PROMPT_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 48
LOGPROBS: Final = 20
ENGINE_KILLS_MAX: Final = 3
"""After this many crashes the agent is replaced: a replica that fails six times in ten minutes is
given up, and the time until each restart doubles."""

BACK_S: Final = 120.0
STREAM_S: Final = 60.0


class NumberedRequest(msgspec.Struct, frozen=True):
    """A stream whose text its seed determines."""

    prompt: list[int]
    seed: int
    output_tokens: int = OUTPUT_TOKENS


class StreamedAnswer(msgspec.Struct, frozen=True):
    """The result of one stream: its text, whether it was ended in order, and how many tokens of
    its prompt another replica had."""

    text: str
    is_whole: bool
    peer_tokens: int


class AttackedNode:
    """A node whose agent can be killed."""

    def __init__(self, setup: NodeSetup) -> None:
        self.setup = setup
        self.engines = [AttackedEngine(self, name) for name in (setup.name, *setup.others)]
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the agent, and wait until its engines are warm."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.bench.engine_node"),
            msgspec.json.encode(self.setup).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(WARM_S):
            self.address = (await self._process.stdout.readline()).decode().strip()
        if not self.address:
            raise AttackFailed(f"node {self.setup.name} did not become warm")

    async def stop(self) -> None:
        """End the agent and its engines."""
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    async def restart_agent(self) -> None:
        """Start another agent for the engines that survived."""
        assert self._process is not None
        await self._process.wait()
        survivors = [engine.pid() for engine in self.engines]
        await self.start()
        if [engine.pid() for engine in self.engines] != survivors:
            raise AttackFailed(f"the agent of {self.setup.name} did not adopt its engines")
        for engine in self.engines:
            engine.kills = 0

    @property
    def agent_pid(self) -> int:
        """The process of the agent."""
        assert self._process is not None
        return self._process.pid

    def kill_agent(self) -> None:
        """Kill the agent."""
        assert self._process is not None
        self._process.kill()

    async def load(self, replica: str) -> headers.ReportedLoad | None:
        """Return the load of a replica, None while it is not warm."""
        async with (
            aiohttp.ClientSession(f"http://{self.address}") as http,
            http.get("/ping") as answer,
        ):
            loads = headers.parse_loads(answer.headers.get(headers.LOADS, ""))
        return loads.get(ReplicaId(replica))


class AttackedEngine:
    """An engine that can be killed, on its node."""

    def __init__(self, node: AttackedNode, name: str) -> None:
        self.node = node
        self.name = name
        self.kills = 0

    def pid(self) -> int:
        """Return the process of the engine."""
        record = self._folder / "process.json"
        return int(msgspec.json.decode(record.read_bytes())["pid"])

    def state(self) -> str:
        """Return whether the process of the engine is alive."""
        try:
            os.kill(self.pid(), 0)
        except ProcessLookupError:
            return "engine dead"
        except OSError:
            return "no engine"
        return "engine alive"

    def kill(self) -> None:
        """Kill the engine; its agent starts another."""
        self.kills += 1
        os.killpg(self.pid(), signal.SIGKILL)

    async def forget_crashes(self) -> None:
        """Begin with a new agent if this one has seen its engine die too often."""
        if self.kills >= ENGINE_KILLS_MAX:
            self.node.kill_agent()
            await self.node.restart_agent()

    async def stats(self) -> Mapping[str, Any]:
        """Return the engine's own counts."""
        connector = aiohttp.UnixConnector(str(self._folder / "engine.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get("http://engine/stats") as answer,
        ):
            return dict(await answer.json())

    @property
    def _folder(self) -> Path:
        return Path(self.node.setup.folder) / "engines" / self.name


class Pair:
    """The engines of the attack."""

    def __init__(self, engines: dict[str, AttackedEngine]) -> None:
        self.engines = engines
        self.last_left = ""
        """The request state that was left at the last check."""

    def may_read(self, readers: Sequence[str]) -> dict[str, str]:
        """Return the header that names the replicas that may read a prompt, in this order."""
        return {headers.PREFILL_REPLICAS: self.peers(readers)}

    def may_have(self, holders: Sequence[str]) -> dict[str, str]:
        """Return the header that names the replicas that may have the KV of a prompt."""
        return {KV_HOLDERS: self.peers(holders)}

    def peers(self, others: Sequence[str], token_us: int = 4000) -> str:
        """Name the decode replica, which takes so long to read a token, and the others."""
        return format_peer_replicas(
            [
                PeerReplica(
                    ReplicaId(name),
                    NodeId(self.engines[name].node.address),
                    self.engines[name].node.address,
                    PROMPT_TOKENS,
                    token_us if name == DECODE else 20,
                    20_000 if name == DECODE else 100,
                )
                for name in (DECODE, *others)
            ]
        )

    async def ask(
        self,
        request: NumberedRequest,
        tenant: str,
        peers: Mapping[str, str] = NO_HEADERS,
        on_tokens: Callable[[int], None] = lambda _: None,
        replica: str = DECODE,
    ) -> StreamedAnswer:
        """Stream one answer of a replica as a router does; what the network does to it is no error.

        `peers` are headers that name other replicas. `on_tokens` gets the tokens until now.
        """
        body = {
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 1.0,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
        }
        sent = {
            headers.REPLICA: replica,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={PROMPT_TOKENS};o={request.output_tokens}",
            headers.PENDING_PREFILL_TOKENS: str(PROMPT_TOKENS),
            headers.PREFILL_MS: "4000",
            **peers,
        }
        received, peer_tokens = bytearray(), 0
        with suppress(aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(STREAM_S),
                aiohttp.ClientSession(f"http://{self.engines[replica].node.address}") as http,
                http.post("/v1/completions", json=body, headers=sent) as response,
            ):
                if response.status == 200:
                    peer_tokens = parse_found(response.headers.get(KV_FOUND, "")).peer
                    async for piece in response.content.iter_any():
                        received += piece
                        on_tokens(received.count(b'"text":'))
        whole = received.decode(errors="replace")
        # A line that was cut is no token.
        lines = [line for line in whole.split("\n") if line.endswith("}")]
        text = "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', "\n".join(lines)))
        return StreamedAnswer(text, "data: [DONE]" in whole, peer_tokens)

    async def likeliest(self, request: NumberedRequest, place: int) -> list[tuple[str, float]]:
        """Return the likeliest tokens at a place of the right answer, and their probabilities."""
        body = {
            "prompt": request.prompt,
            "max_tokens": place + 1,
            "temperature": 1.0,
            "seed": request.seed,
            "ignore_eos": True,
            "logprobs": LOGPROBS,
        }
        sent = {headers.REPLICA: DECODE, headers.CACHE_SALT: f"likeliest {request.seed}"}
        async with (
            aiohttp.ClientSession(f"http://{self.engines[DECODE].node.address}") as http,
            http.post("/v1/completions", json=body, headers=sent) as response,
        ):
            answer = await response.json()
        found = answer["choices"][0]["logprobs"]["top_logprobs"][-1]
        by_token = sorted(found.items(), key=lambda pair: -pair[1])
        return [(token, math.exp(logprob)) for token, logprob in by_token]

    async def window_leases(self) -> int:
        """Return how often the engines have leased memory that another process maps."""
        stats = [await engine.stats() for engine in self.engines.values()]
        return sum(int(one["kv_window_leases_total"]) for one in stats)

    async def wait_clean(self) -> None:
        """Wait until every replica is warm and nothing is left of any request."""
        async with asyncio.timeout(BACK_S):
            for engine in self.engines.values():
                while (left := await self._left(engine)) is not None:
                    self.last_left = f"{engine.name}: {left}"
                    await asyncio.sleep(0.05)

    async def _left(self, engine: AttackedEngine) -> str | None:
        """Return what is left of requests at a replica, None for nothing."""
        try:
            load = await engine.node.load(engine.name)
            if load is None:
                return f"not warm, {engine.state()}"
            stats = await engine.stats()
        except (aiohttp.ClientError, OSError) as error:
            return f"no answer: {error}, {engine.state()}"
        tokens = load.prefill_tokens + load.decode_tokens + load.running
        blocks = stats["kv_transfer_held_blocks"] + stats["kv_blocks_used"]
        waiting, leased = stats["kv_transfers_waiting"], stats["kv_windows_leased"]
        if not (tokens or blocks or waiting or leased):
            return None
        return (
            f"{tokens} tokens and requests, {blocks} blocks, {waiting} transfers, {leased} windows"
        )


@asynccontextmanager
async def a_pair(
    folder: Path,
    *,
    on_one_node: bool = False,
    share_kv: bool = False,
    readers: Sequence[str] = READERS,
    probe_timeout_s: float | None = None,
) -> AsyncIterator[Pair]:
    """Run the replicas with a tiny model, on a node each or `on_one_node`."""
    model = folder / "model"
    model.mkdir()
    with patch.dict(tiny.CONFIGS["qwen3"], head_dim=HEAD_DIM):
        tiny.write_folder(model, "qwen3")
    tiny.write_tokenizer(model)
    async with AsyncExitStack() as stack:
        nodes = []
        for name in (DECODE,) if on_one_node else (DECODE, *readers):
            setup = NodeSetup(
                name=name,
                others=tuple(readers) if on_one_node else (),
                model=str(model),
                folder=str(folder / name),
                kv_memory_bytes=KV_MEMORY_BYTES,
                context_tokens=512,
                share_kv=share_kv,
                pause_s=PAUSE_S,
                probe_timeout_s=probe_timeout_s,
                has_equal_priority=True,
                options={"batch_tokens_max": "32"},
            )
            nodes.append(AttackedNode(setup))
            stack.push_async_callback(nodes[-1].stop)
        await asyncio.gather(*[node.start() for node in nodes])
        yield Pair({engine.name: engine for node in nodes for engine in node.engines})


def a_request(chance: random.Random) -> NumberedRequest:
    """Return a request that no other one shares a block with."""
    prompt = [1 + chance.randrange(60) for _ in range(PROMPT_TOKENS)]
    return NumberedRequest(prompt, chance.randrange(1, 1 << 30))
