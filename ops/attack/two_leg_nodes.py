"""The nodes of ops.attack.two_leg_kills: one answers, and two have replicas that read its prompts.

Each node's agent and engine are processes, with a tiny model, and can be killed.
"""

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from ops.bench.engine_node import NodeSetup
from ops.golden import tiny

DECODE, READERS = "d", ("p1", "p2")
PROMPT_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 48
ENGINE_KILLS_MAX: Final = 3
"""After this many crashes the agent is replaced: a replica that fails six times in ten minutes is
given up, and the time until each restart doubles."""

BACK_S: Final = 120.0
STREAM_S: Final = 60.0


class AttackFailed(Exception):
    """A token was lost, repeated or leaked, or a part did not come back."""


class NumberedRequest(msgspec.Struct, frozen=True):
    """A stream whose text its seed determines."""

    prompt: list[int]
    seed: int
    output_tokens: int = OUTPUT_TOKENS


class StreamedAnswer(msgspec.Struct, frozen=True):
    """The result of one stream: its text, and whether it was ended in order."""

    text: str
    is_whole: bool


class AttackedNode:
    """A node whose agent and engine can be killed."""

    def __init__(self, setup: NodeSetup) -> None:
        self.setup = setup
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None
        self._engine_kills = 0

    async def start(self) -> None:
        """Start the agent, and wait until its engine is warm."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.bench.engine_node"),
            msgspec.json.encode(self.setup).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(BACK_S):
            self.address = (await self._process.stdout.readline()).decode().strip()
        if not self.address:
            raise AttackFailed(f"node {self.setup.name} did not become warm")

    async def stop(self) -> None:
        """End the agent and its engine."""
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    def engine_pid(self) -> int:
        """Return the process of the engine."""
        record = self._engine_folder / "process.json"
        return int(msgspec.json.decode(record.read_bytes())["pid"])

    def engine_state(self) -> str:
        """Say whether the process of the engine is alive."""
        try:
            os.kill(self.engine_pid(), 0)
        except ProcessLookupError:
            return "engine dead"
        except OSError:
            return "no engine"
        return "engine alive"

    def kill_engine(self) -> None:
        """Kill the engine; its agent starts another."""
        self._engine_kills += 1
        os.killpg(self.engine_pid(), signal.SIGKILL)

    async def forget_crashes(self) -> None:
        """Begin with a new agent if this one has seen its engine die too often."""
        if self._engine_kills >= ENGINE_KILLS_MAX:
            self.kill_agent()
            await self.restart_agent()

    async def restart_agent(self) -> None:
        """Start another agent for the engine that survived."""
        assert self._process is not None
        await self._process.wait()
        self._engine_kills = 0
        survivor = self.engine_pid()
        await self.start()
        if self.engine_pid() != survivor:
            raise AttackFailed(f"the agent of {self.setup.name} did not adopt its engine")

    def kill_agent(self) -> None:
        """Kill the agent."""
        assert self._process is not None
        self._process.kill()

    async def engine_stats(self) -> Mapping[str, Any]:
        """Return the engine's own counts."""
        connector = aiohttp.UnixConnector(str(self._engine_folder / "engine.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get("http://engine/stats") as answer,
        ):
            return dict(await answer.json())

    async def load(self) -> headers.ReportedLoad | None:
        """Return the load of the replica, None while it is not warm."""
        async with (
            aiohttp.ClientSession(f"http://{self.address}") as http,
            http.get("/ping") as answer,
        ):
            loads = headers.parse_loads(answer.headers.get(headers.LOADS, ""))
        return loads.get(ReplicaId(self.setup.name))

    @property
    def _engine_folder(self) -> Path:
        return Path(self.setup.folder) / "engines" / self.setup.name


class Pair:
    """The nodes of the attack."""

    def __init__(self, nodes: Mapping[str, AttackedNode]) -> None:
        self.nodes = nodes
        self.last_left = ""
        """The request state that was left at the last check."""

    def peers(self, readers: Sequence[str]) -> str:
        """Return the header that names the decode replica, slow at reading, and the readers."""
        return headers.format_peer_replicas(
            [
                PeerReplica(
                    ReplicaId(name),
                    NodeId(self.nodes[name].address),
                    self.nodes[name].address,
                    PROMPT_TOKENS,
                    4000 if name == DECODE else 20,
                    20_000 if name == DECODE else 100,
                )
                for name in (DECODE, *readers)
            ]
        )

    async def ask(
        self,
        request: NumberedRequest,
        tenant: str,
        readers: Sequence[str] = (),
        on_tokens: Callable[[int], None] = lambda _: None,
    ) -> StreamedAnswer:
        """Stream one answer as a router does; what the network does to it is no error.

        `readers` may read the prompt, in this order. `on_tokens` gets the tokens until now.
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
            headers.REPLICA: DECODE,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={PROMPT_TOKENS};o={request.output_tokens}",
            headers.PENDING_PREFILL_TOKENS: str(PROMPT_TOKENS),
            headers.PREFILL_MS: "4000",
        }
        if readers:
            sent[headers.PREFILL_REPLICAS] = self.peers(readers)
        received = bytearray()
        with suppress(aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(STREAM_S),
                aiohttp.ClientSession(f"http://{self.nodes[DECODE].address}") as http,
                http.post("/v1/completions", json=body, headers=sent) as response,
            ):
                if response.status == 200:
                    async for piece in response.content.iter_any():
                        received += piece
                        on_tokens(received.count(b'"text":'))
        whole = received.decode(errors="replace")
        # A line that was cut is no token.
        lines = [line for line in whole.split("\n") if line.endswith("}")]
        text = "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', "\n".join(lines)))
        return StreamedAnswer(text, "data: [DONE]" in whole)

    async def wait_clean(self) -> None:
        """Wait until every replica is warm and nothing is left of any request."""
        async with asyncio.timeout(BACK_S):
            for node in self.nodes.values():
                while (left := await self._left(node)) is not None:
                    self.last_left = f"{node.setup.name}: {left}"
                    await asyncio.sleep(0.05)

    async def _left(self, node: AttackedNode) -> str | None:
        """Return what is left of requests at a node, None for nothing."""
        try:
            load = await node.load()
            if load is None:
                return f"not warm, {node.engine_state()}"
            stats = await node.engine_stats()
        except (aiohttp.ClientError, OSError) as error:
            return f"no answer: {error}, {node.engine_state()}"
        tokens = load.prefill_tokens + load.decode_tokens + load.running
        blocks = stats["kv_transfer_held_blocks"] + stats["kv_blocks_used"]
        waiting = stats["kv_transfers_waiting"]
        if not (tokens or blocks or waiting):
            return None
        return f"{tokens} tokens and requests, {blocks} blocks, {waiting} transfers"


@asynccontextmanager
async def a_pair(folder: Path) -> AsyncIterator[Pair]:
    """Run the three nodes with a tiny model."""
    model = folder / "model"
    model.mkdir()
    tiny.write_folder(model, "qwen3")
    tiny.write_tokenizer(model)
    async with AsyncExitStack() as stack:
        nodes = {}
        for name in (DECODE, *READERS):
            setup = NodeSetup(
                name=name,
                model=str(model),
                folder=str(folder / name),
                kv_memory_bytes=4 * 1024**2,
                context_tokens=512,
                options={"batch_tokens_max": "32"},
            )
            nodes[name] = AttackedNode(setup)
            stack.push_async_callback(nodes[name].stop)
        await asyncio.gather(*[node.start() for node in nodes.values()])
        yield Pair(nodes)


def a_request(chance: random.Random) -> NumberedRequest:
    """Return a request that no other one shares a block with."""
    prompt = [1 + chance.randrange(60) for _ in range(PROMPT_TOKENS)]
    return NumberedRequest(prompt, chance.randrange(1, 1 << 30))
