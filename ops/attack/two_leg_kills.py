"""kill -9 of each part of two-leg requests at seeded instants under load: is any token lost?

    python -m ops.attack.two_leg_kills [--instants 50] [--seed 1] [--victim NAME ...]

One node answers, and two have replicas that read its prompts; each node's agent and engine are
processes. At each instant several streams are under way and one process is killed: the prefill
engine, the decode engine, or the agent of either. Streams are sampled with seeds, so each has one
right text. An answer that was ended in order has to be that text, one that was cut a beginning of
it. Only those at the decode node may be cut. Afterwards the part that was killed has to come back,
and no node may hold tokens or KV blocks. A node of the prefill side that is gone costs no answer.

With 4 instants of each, seed 1, on a busy machine (2 cores): killed on the prefill side, all 32
answers whole; decode engine, 6 cut and 10 without a token; decode agent, 16 without a token.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.wire import headers
from isochrone.wire.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from ops.bench.engine_node import NodeSetup
from ops.golden import tiny

VICTIMS: Final = ("prefill engine", "decode engine", "prefill agent", "decode agent")
DECODE, READERS = "d", ("p1", "p2")
STREAMS: Final = 4
PROMPT_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 24
KILL_WITHIN: Final = 2.5
"""An instant is drawn from so many times what an answer took before the attack."""

KILLS_PER_FLEET: Final = 4
"""Then new nodes begin: a replica that fails six times in ten minutes is given up."""

BACK_S: Final = 120.0
STREAM_S: Final = 60.0


class AttackFailed(Exception):
    """A token was lost, repeated or leaked, or a part did not come back."""


class NumberedRequest(msgspec.Struct, frozen=True):
    """A stream whose text its seed determines."""

    prompt: list[int]
    seed: int


class StreamedAnswer(msgspec.Struct, frozen=True):
    """What came of one stream: its text, whether it was ended in order, and who read its prompt."""

    text: str
    is_whole: bool
    was_read_elsewhere: bool = False


class AttackedNode:
    """A node whose agent and engine can be killed."""

    def __init__(self, setup: NodeSetup) -> None:
        self.setup = setup
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None

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

    def kill_engine(self) -> None:
        """Kill the engine; its agent starts another."""
        os.killpg(self.engine_pid(), signal.SIGKILL)

    async def restart_agent(self) -> None:
        """Start another agent for the engine that survived."""
        assert self._process is not None
        await self._process.wait()
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
        """What was left of requests when it was looked at last."""

    def peers(self) -> str:
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
                for name in (DECODE, *READERS)
            ]
        )

    async def ask(self, request: NumberedRequest, tenant: str, *, alone: bool) -> StreamedAnswer:
        """Stream one answer as a router does; what the network does to it is no error."""
        body = {
            "prompt": request.prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 1.0,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
        }
        sent = {
            headers.REPLICA: DECODE,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={PROMPT_TOKENS};o={OUTPUT_TOKENS}",
            headers.PENDING_PREFILL_TOKENS: str(PROMPT_TOKENS),
            headers.PREFILL_MS: "4000",
        }
        if not alone:
            sent[headers.PREFILL_REPLICAS] = self.peers()
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
        with suppress(aiohttp.ClientError, OSError):
            load, stats = await node.load(), await node.engine_stats()
            if load is None:
                return "not warm"
            tokens = load.prefill_tokens + load.decode_tokens + load.running
            blocks = stats["kv_transfer_held_blocks"] + stats["kv_blocks_used"]
            waiting = stats["kv_transfers_waiting"]
            if not (tokens or blocks or waiting):
                return None
            return f"{tokens} tokens and requests, {blocks} blocks, {waiting} transfers"
        return "no answer"


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


async def attack_once(pair: Pair, victim: str, instant: int, seed: int) -> Counter[str]:
    """Kill one part while streams are under way; return how these ended."""
    chance = random.Random(f"{seed} {victim} {instant}")
    requests = [a_request(chance) for _ in range(STREAMS)]
    expected, began_s = [], time.monotonic()
    for request in requests:
        alone = await pair.ask(request, f"alone {instant}", alone=True)
        if not alone.is_whole:
            raise AttackFailed(f"{victim}, instant {instant}: no answer before the attack")
        expected.append(alone.text)
    answer_s = (time.monotonic() - began_s) / STREAMS
    reader = pair.nodes[chance.choice(READERS)]
    node = reader if victim.startswith("prefill") else pair.nodes[DECODE]
    kill = node.kill_engine if victim.endswith("engine") else node.kill_agent

    async def stream(request: NumberedRequest, delay_s: float) -> StreamedAnswer:
        await asyncio.sleep(delay_s)
        return await pair.ask(request, f"{victim} {instant}", alone=False)

    async def kill_later(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        kill()

    delays_s = [chance.uniform(0, answer_s) for _ in requests]
    killing = asyncio.create_task(kill_later(chance.uniform(0, KILL_WITHIN * answer_s)))
    answers = await asyncio.gather(*map(stream, requests, delays_s))
    await killing
    if victim.endswith("agent"):
        await node.restart_agent()
    try:
        await pair.wait_clean()
    except TimeoutError as error:
        raise AttackFailed(f"{victim}, instant {instant}: {pair.last_left}") from error
    ends: Counter[str] = Counter()
    for text, answer in zip(expected, answers, strict=True):
        if answer.is_whole and answer.text != text:
            raise AttackFailed(f"{victim}, instant {instant}: {answer.text!r}, not {text!r}")
        if not text.startswith(answer.text):
            raise AttackFailed(f"{victim}, instant {instant}: {answer.text!r} of {text!r}")
        if not answer.is_whole and node is not pair.nodes[DECODE]:
            raise AttackFailed(f"{victim}, instant {instant}: an answer was lost")
        ends["whole" if answer.is_whole else "cut" if answer.text else "none"] += 1
    return ends


async def attack(instants: int, seed: int, victims: tuple[str, ...] = VICTIMS) -> list[str]:
    """Run the attack; return a line for each victim. Raises AttackFailed."""
    ends: dict[str, Counter[str]] = {victim: Counter() for victim in victims}
    kills = [(victim, instant) for victim in victims for instant in range(instants)]
    for first in range(0, len(kills), KILLS_PER_FLEET):
        with tempfile.TemporaryDirectory(prefix="kill") as folder:
            async with a_pair(Path(folder)) as pair:
                for victim, instant in kills[first : first + KILLS_PER_FLEET]:
                    ends[victim] += await attack_once(pair, victim, instant, seed)
    return [
        f"{victim}: {instants} instants, {ended['whole']} answers whole, {ended['cut']} cut,"
        f" {ended['none']} without a token"
        for victim, ended in ends.items()
    ]


def main() -> int:
    """Run the attack and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m ops.attack.two_leg_kills")
    parser.add_argument("--instants", type=int, default=50, help="of each victim")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victim", nargs="*", choices=VICTIMS, default=VICTIMS)
    arguments = parser.parse_args()
    try:
        lines = asyncio.run(attack(arguments.instants, arguments.seed, tuple(arguments.victim)))
    except AttackFailed as failure:
        sys.stdout.write(f"failed: {failure}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
