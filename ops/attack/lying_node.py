"""A node lies to the router: about its load and its caches, and about who has a request.

    python -m ops.attack.lying_node [--only NAME] [--requests 60]

A router with three nodes, of which one is hostile. Clients of another tenant send streams, four at
a time. Each attack has a router of its own. Prints a row each: how many streams did not end
rightly; how many attempts the hostile node got, and how many for each stream of the second half;
the slowest answer, and the slowest of the second half.
"""

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web

from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from nodeagent.api.request.handoff_notice import announce_replica
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_route, a_table

AT_ONCE: Final = 4
TOKENS: Final = 6
FIRST_BYTE_S: Final = 2.0
"""The router's time limit for a first token, 60 s by default."""

LATE_S: Final = 4.5
"""How late an answer is that is only late: less than FIRST_BYTE_LATE_S, the limit meanwhile."""

FIRST_BYTE_LATE_S: Final = 6.0

LOOPS: Final = 400
"""Notices of handoffs, some 24 kB. A router reads 32 KiB of heads."""

PREFILL_TOKENS_PER_S: Final = 2000.0
PROMPT: Final = "word " * 400
"""Long enough that a handoff may save time."""


class LyingNode(FakeNode):
    """The hostile node: `pong` and `head` are the loads that it reports, `lie` is what it does."""

    pong = head = "p=0;d=0;r=0;w=0;u=0;o=0;e=0"
    lie = ""
    attacked = 0

    async def ping(self, request: web.Request) -> web.Response:
        """Report the load that the attack has."""
        self.loads = f"r-{self.name} {self.pong}"
        return await super().ping(request)

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        self.attacked += 1
        self.load = self.head
        peers = headers.parse_peer_replicas(request.headers.get(headers.PEER_REPLICAS, ""))
        other = peers[1].replica_id if len(peers) > 1 else ReplicaId("r-n1")
        if self.lie == "hang":
            await asyncio.Event().wait()
        if self.lie.startswith("handoff"):
            await announce_replica(request, other)
        if self.lie == "handoff, fail":
            assert request.transport is not None
            request.transport.abort()
        if self.lie == "handoff, hang":
            await asyncio.Event().wait()
        if self.lie == "handoff, loop":
            for number in range(LOOPS):
                await announce_replica(request, (ReplicaId(f"r-{self.name}"), other)[number % 2])
            await asyncio.Event().wait()
        if self.lie in ("handoff, late", "handoff, busy"):
            self.handed_off_to = other if len(peers) > 1 else ""
        if self.lie == "handoff, late":
            await asyncio.sleep(LATE_S)
        if self.lie == "late tokens":
            return await self._after_cancel(request)
        return await super()._answer(request, body)

    async def _after_cancel(self, request: web.Request) -> web.StreamResponse:
        """Go on sending until the connection is closed, whatever its client does."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"content": "WRONG "}, "finish_reason": None}
        frame = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        while True:
            await response.write(frame * 100)


class Attack(NamedTuple):
    """The loads that a node reports in pongs and answers, and what else it does."""

    name: str
    pong: str = LyingNode.pong
    head: str = LyingNode.head
    lie: str = ""


HUGE: Final = "9" * 15
ATTACKS: Final = (
    Attack("none", pong="p=0;d=0;r=0;w=0;u=0", head="p=0;d=0;r=0;w=0;u=0"),
    Attack("always idle"),
    Attack("negative", pong="p=-9;d=-9;r=-9;w=-9;u=-9;o=-9;e=-9", head="p=-9;d=-9;r=-9;w=-9"),
    Attack("NaN", pong="p=nan;d=nan;r=nan;w=nan;u=nan", head="p=nan;d=inf;r=nan;w=nan"),
    Attack("10^15 of all", *[";".join(f"{f}={HUGE}" for f in "pdrwuoezcstbk")] * 2),
    Attack("10^4000 of all", *[";".join(f"{f}=1{'0' * 4000}" for f in "pdrw")] * 2),
    Attack("its cache keeps all", *[f"{LyingNode.pong};c={HUGE}"] * 2),
    Attack("its cache keeps nothing", *[f"{LyingNode.pong};c=0"] * 2),
    Attack(
        "others are busy", pong=f"p=0;d=0;r=0;w=0,r-n1 p={HUGE};d=0;r=9;w=9;u={HUGE};o={HUGE};e=0"
    ),
    Attack("hangs", lie="hang"),
    Attack("handed off, hangs", lie="handoff, hang"),
    Attack("handed off, fails", lie="handoff, fail"),
    Attack("handed off, late", lie="handoff, late"),
    Attack("handed off, busy there", head=f"p=0;d=0;r=9;w=9;u=0;o={HUGE};e=0", lie="handoff, busy"),
    Attack("handed off, full there", head=f"p=0;d=0;r=9;w=9;u=0;o=0;e={HUGE}", lie="handoff, busy"),
    Attack("handed off, asleep there", head=f"{LyingNode.head};z={HUGE}", lie="handoff, busy"),
    Attack("handed off to and fro", lie="handoff, loop"),
    Attack("sends on after a cancel", lie="late tokens"),
)


class Stream(NamedTuple):
    """One answer to another tenant."""

    is_right: bool
    took_s: float


async def a_stream(bench: Bench, number: int) -> Stream:
    """Send one request."""
    began_s = time.perf_counter()
    text, fields = "", {"stream": True, "max_tokens": TOKENS, "temperature": 0}
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(30), bench.chat(f"{number} {PROMPT}", **fields) as response:
            text = await response.text()
    found = re.findall(r"\bt\d+|WRONG", text)
    is_right = found == [f"t{n}" for n in range(TOKENS)] and "[DONE]" in text
    return Stream(is_right, time.perf_counter() - began_s)


async def cancel_some(bench: Bench) -> None:
    """Send requests and leave before they are answered, as clients do."""
    for number in range(20):
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(0.1), bench.chat(f"c{number}", stream=True) as response:
                await response.content.read(100)


async def attack(one: Attack, requests: int, folder: Path) -> str:
    """Run one attack; return its row."""
    hostile = LyingNode("h")
    hostile.pong, hostile.head, hostile.lie = one.pong, one.head, one.lie
    nodes: Sequence[FakeNode] = (hostile, FakeNode("n1"), FakeNode("n2"))
    for node in nodes:
        node.itl_s, node.ttft_s, node.resumes = 0.002, 0.02, "greedy"
    limit_s = FIRST_BYTE_LATE_S if one.lie == "handoff, late" else FIRST_BYTE_S
    async with a_bench(folder, nodes, first_byte_timeout_s=limit_s) as bench:
        rate = PREFILL_TOKENS_PER_S
        routes = [a_route(node, prefill_tokens_per_s=rate) for node in nodes]
        bench.app.fleet.adopt(a_table(routes, generation=2))
        await bench.app.loops["probe"].wait_turns(2)
        if one.lie == "late tokens":
            await cancel_some(bench)
            hostile.lie = ""
        streams: list[Stream] = []
        numbers = iter(range(requests))
        half_attempts = 0

        async def one_after_another() -> None:
            nonlocal half_attempts
            for number in numbers:
                streams.append(await a_stream(bench, number))
                if len(streams) == requests // 2:
                    half_attempts = hostile.attacked

        await asyncio.gather(*[one_after_another() for _ in range(AT_ONCE)])
        later = streams[requests // 2 :]
        wrong = sum(not stream.is_right for stream in streams)
        share = (hostile.attacked - half_attempts) / max(1, len(later))
        slowest_s = max(stream.took_s for stream in streams)
        later_s = max(stream.took_s for stream in later)
    return (
        f"| {one.name} | {wrong} of {requests} | {hostile.attacked} | {share:.0%}"
        f" | {slowest_s:.2f} s | {later_s:.2f} s |"
    )


def main() -> None:
    """Run the attacks and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m ops.attack.lying_node")
    parser.add_argument("--only", default="", help="attacks with this in their names")
    parser.add_argument("--requests", type=int, default=60, help="of the other tenant, each time")
    given = parser.parse_args()
    print("| attack | not answered rightly | attempts there | later | slowest | later |")
    print("|---|---|---|---|---|---|")
    for one in ATTACKS:
        if given.only in one.name:
            with tempfile.TemporaryDirectory() as folder:
                print(asyncio.run(attack(one, given.requests, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
