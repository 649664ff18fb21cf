"""A node of the same PoP attacks an honest node that exchanges KV and requests with it.

    python -m ops.attack.hostile_peer [--only NAME] [--seconds 6]

Two nodes with a tiny model that share KV, and a hostile node before one of them (`hostile_node`).
This program is the router: it names the hostile node as the holder of a prefix, as the reader of a
prompt, or as the one to hand a request off to. Meanwhile others' requests, which name no other
node, and pings go to the honest node. Further attacks send that node requests. Nodes are used again
at once after a failure (`NodeSetup.pause_s`), so that each request is attacked. Prints a row each:
how many attacked requests had the right text, none, or a wrong one; the slowest of them; the
slowest of the others and of the pings; and how much memory agent and engine had more than before.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import psutil

from isochrone.wire.http import headers
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing
from ops.attack.hostile_node import (
    HostileNode,
    block_attacks,
    handoff_attacks,
    locate_attacks,
)
from ops.attack.two_leg_nodes import (
    DECODE,
    AttackedEngine,
    AttackedNode,
    NumberedRequest,
    Pair,
    a_pair,
    a_request,
)
from ops.bench.engine_node import NodeSetup

READER: Final = "p1"
HOSTILE: Final = "h"
AT_ONCE: Final = 3
ROUNDS: Final = 1
GIVEN_UP_S: Final = 40.0
"""The time after which the router gives a request up."""

TOKEN_US: Final = 15_000
"""The honest node believes that a prompt takes three seconds: long enough for other nodes to answer
its questions on a busy machine, which may take a tenth of that."""

NAMED: Final = {
    "fetch": kv_sharing.KV_HOLDERS,
    "leg": headers.PREFILL_REPLICAS,
    "handoff": headers.PEER_REPLICAS,
}
"""The header that names the hostile node."""

PROBE_TIMEOUT_S: Final = 2.0
PAUSE_S: Final = 0.05
SHORT: Final = 16
"""Tokens of the answers."""


class HostileReplicaNode(AttackedNode):
    """The node of the hostile node's replica, which has no agent and no engine."""

    def __init__(self, node: HostileNode, real: NodeSetup) -> None:
        super().__init__(real)
        self.address = node.address


class NeighbourWatch:
    """What the honest node's neighbours notice."""

    def __init__(self, pair: Pair, agent: psutil.Process, engine: psutil.Process) -> None:
        self._pair = pair
        self._processes = {"agent": agent, "engine": engine}
        self.begin()

    def begin(self) -> None:
        """Forget what was seen."""
        self._before = {name: p.memory_info().rss for name, p in self._processes.items()}
        self.grown_mib = dict.fromkeys(self._processes, 0.0)
        self.slowest_s = {"other": 0.0, "ping": 0.0}
        self.failed = self.answered = 0

    async def run(self) -> None:
        """NeighbourWatch until cancelled."""
        await asyncio.gather(self._ask(), self._ping(), self._weigh())

    async def _weigh(self) -> None:
        while True:
            for name, process in self._processes.items():
                grown = (process.memory_info().rss - self._before[name]) / 2**20
                self.grown_mib[name] = max(self.grown_mib[name], grown)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self) -> None:
        chance = random.Random(5)
        while True:
            prompt = [1 + chance.randrange(60) for _ in range(20)]
            began_s = time.perf_counter()
            answer = await self._pair.ask(NumberedRequest(prompt, 7, 4), "other")
            self.failed += not answer.is_whole
            self.answered += 1
            self._note("other", began_s)
            await asyncio.sleep(PAUSE_S)

    async def _ping(self) -> None:
        address = self._pair.engines[DECODE].node.address
        async with aiohttp.ClientSession(f"http://{address}") as http:
            while True:
                began_s = time.perf_counter()
                with suppress(aiohttp.ClientError, OSError):
                    async with http.get("/ping") as pong:
                        await pong.read()
                self._note("ping", began_s)
                await asyncio.sleep(PAUSE_S)

    def _note(self, what: str, began_s: float) -> None:
        self.slowest_s[what] = max(self.slowest_s[what], time.perf_counter() - began_s)

    def row(self) -> str:
        """Return the columns of what was seen."""
        return (
            f"{self.slowest_s['other']:.2f} s, {self.failed} of {self.answered} failed"
            f" | {self.slowest_s['ping']:.2f} s | {self.grown_mib['agent']:+.0f} MiB"
            f" | {self.grown_mib['engine']:+.0f} MiB"
        )


class Attacks:
    """The attacks, one after the other, on one pair."""

    def __init__(
        self, pair: Pair, hostile: HostileNode, watch: NeighbourWatch, seconds: float
    ) -> None:
        self._pair = pair
        self._hostile = hostile
        self._watch = watch
        self._seconds = seconds
        self._chance = random.Random(3)

    async def answers(self, name: str, kind: str) -> None:
        """Attack requests that the hostile node is named for; print the row."""
        self._hostile.attack = name
        self._hostile.begun = 0
        self._watch.begin()
        outcomes: dict[str, int] = {"right": 0, "none": 0, "wrong": 0}
        slowest_s = 0.0
        for _ in range(ROUNDS):
            asked = [self._attacked(kind) for _ in range(AT_ONCE)]
            for outcome, took_s in await asyncio.gather(*asked):
                outcomes[outcome] += 1
                slowest_s = max(slowest_s, took_s)
        counts = ", ".join(f"{count} {what}" for what, count in outcomes.items() if count)
        print(
            f"| {kind}: {name} | {self._hostile.begun} | {counts} | {slowest_s:.2f} s"
            f" | {self._watch.row()} |",
            flush=True,
        )

    async def _attacked(self, kind: str) -> tuple[str, float]:
        """Send one request; return what came of it, and how long it took."""
        request = msgspec.structs.replace(a_request(self._chance), output_tokens=SHORT)
        tenant = f"t{self._chance.randrange(3)}"
        expected = await self._pair.ask(request, tenant, replica=READER)
        named = {NAMED[kind]: self._pair.peers([HOSTILE], TOKEN_US)}
        began_s = time.perf_counter()
        text = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVEN_UP_S):
                answer = await self._pair.ask(request, tenant, named)
                text = answer.text if answer.is_whole else ""
        took_s = time.perf_counter() - began_s
        if not text:
            return "none", took_s
        if text != expected.text:
            print(f"{expected} became {text!r}", file=sys.stderr)
            return "wrong", took_s
        return "right", took_s

    async def requests(self, name: str, send: Callable[[str], Awaitable[None]]) -> None:
        """Send the honest node requests for some seconds; print the row."""
        self._watch.begin()
        began_s = time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await send(self._pair.engines[DECODE].node.address)
        took_s = time.perf_counter() - began_s
        print(f"| request: {name} | | | {took_s:.2f} s | {self._watch.row()} |", flush=True)


def head(path: str, length: int | str, more: Mapping[str, str] | None = None) -> bytes:
    """Return the head of a request to the honest node."""
    sent = {headers.REPLICA: DECODE, "content-length": str(length), **(more or {})}
    lines = "".join(f"{name}: {text}\r\n" for name, text in sent.items())
    return f"POST {path} HTTP/1.1\r\nhost: n\r\n{lines}\r\n".encode()


async def send_many(address: str, count: int, parts: list[bytes], pause_s: float = 0.0) -> None:
    """Open connections, send parts on each with pauses between them, and read nothing."""
    host, _, port = address.partition(":")
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port), limit=1)
                writers.append(writer)
        for part in parts:
            for writer in writers:
                with suppress(OSError):
                    writer.write(part)
                    await writer.drain()
            await asyncio.sleep(pause_s)
        await asyncio.Event().wait()
    finally:
        for writer in writers:
            writer.transport.abort()


def request_attacks() -> dict[str, Callable[[str], Awaitable[None]]]:
    """Return what each attack sends the honest node."""
    chain = msgspec.msgpack.encode({"digests": [bytes(32)] * 16_384})
    longer = msgspec.msgpack.encode({"digests": [bytes(32)] * 30_000})
    nested = b"\x81\xa7digests" + b"\x91" * 500_000
    count = b"\x81\xa7digests\xdd\xff\xff\xff\xff"
    blocks, locate, keep = kv_sharing.BLOCKS_PATH, kv_sharing.LOCATE_PATH, kv_sharing.KEEP_PATH
    chat = "/v1/completions"
    megabyte = b" " * 2**20

    def sent(path: str, body: bytes, times: int = 1, **fields: str) -> list[bytes]:
        return [head(path, len(body), fields) + body] * times

    return {
        "2,000 connections without a request": lambda at: send_many(at, 2000, []),
        "2,000 unfinished heads": lambda at: send_many(at, 2000, [b"POST /kv/blocks HTTP/1.1\r\n"]),
        "100 unfinished bodies of 8 MiB": lambda at: send_many(
            at, 100, [head(chat, 8 * 2**20), *[megabyte] * 7]
        ),
        "20 unfinished sounds of 64 MiB": lambda at: send_many(
            at, 20, [head("/v1/audio/transcriptions", 64 * 2**20), *[megabyte] * 60]
        ),
        "200 unfinished queries of 1 MiB": lambda at: send_many(
            at, 200, [head(locate, 2**20), megabyte[:-1]]
        ),
        "16,384 blocks it must not get": lambda at: send_many(at, 100, sent(locate, chain, 20)),
        "30,000 blocks": lambda at: send_many(at, 100, sent(locate, longer, 20)),
        "deep nesting": lambda at: send_many(at, 100, sent(locate, nested, 20)),
        "2^32 blocks": lambda at: send_many(at, 100, sent(locate, count, 20)),
        "first block 10^30": lambda at: send_many(
            at, 100, sent(blocks, chain, 1, **{"x-isochrone-kv-first-block": "1" + "0" * 30})
        ),
        "keeps from nowhere": lambda at: send_many(at, 100, sent(keep, keep_query("127.0.0.1:9"))),
        "keeps from itself": lambda at: send_many(at, 100, sent(keep, keep_query(at))),
    }


def keep_query(source: str) -> bytes:
    """Return a query to keep blocks that a source has."""
    peer = headers.PeerReplica(ReplicaId(DECODE), NodeId("x"), source, 1, 1, 1)
    query = kv_sharing.KeepQuery(source=peer, digests=tuple(bytes([n] * 32) for n in range(64)))
    return msgspec.msgpack.encode(query)


async def run(only: str, seconds: float) -> None:
    """Run the attacks, and print the table."""
    print("| attack | times | attacked requests | slowest | others | ping | agent | engine |")
    print("|---|---|---|---|---|---|---|---|")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-"))
        pair = await stack.enter_async_context(
            a_pair(Path(folder), readers=(READER,), share_kv=True, probe_timeout_s=PROBE_TIMEOUT_S)
        )
        real = pair.engines[READER].node
        hostile = await stack.enter_async_context(HostileNode(real.address).listening())
        pair.engines[HOSTILE] = AttackedEngine(HostileReplicaNode(hostile, real.setup), HOSTILE)
        honest = pair.engines[DECODE]
        hostile.honest, hostile.peers = honest.node.address, pair.peers([HOSTILE], TOKEN_US)
        watch = NeighbourWatch(
            pair, psutil.Process(honest.node.agent_pid), psutil.Process(honest.pid())
        )
        watching = asyncio.create_task(watch.run())
        attacks = Attacks(pair, hostile, watch, seconds)
        try:
            await run_all(attacks, only)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def run_all(attacks: Attacks, only: str) -> None:
    """Run the attacks with `only` in their names."""
    for kind, names in (
        ("leg", list(block_attacks())),
        ("handoff", list(handoff_attacks())),
        ("fetch", [*block_attacks(), *locate_attacks()]),
    ):
        for name in names:
            if only in f"{kind}: {name}":
                await attacks.answers(name, kind)
    for name, send in request_attacks().items():
        if only in f"request: {name}":
            await attacks.requests(name, send)


def main() -> None:
    """Read the arguments and attack."""
    parser = argparse.ArgumentParser(prog="python -m ops.attack.hostile_peer")
    parser.add_argument("--only", default="", help="attacks with this in their names")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack by requests")
    given = parser.parse_args()
    asyncio.run(run(given.only, given.seconds))


if __name__ == "__main__":
    main()
