"""Let the clients of a router leave fifty thousand streams: does it keep anything?

    python -m ops.attack.leaving_streams [--count 50000] [--seed 1]

A router process before a fake node. Each client leaves at a stage drawn from the seed: once its
request is sent, with the head of the answer, in mid-stream, or at the end. The prompts are new. The
table shows after each tenth the router's memory (rss; anon, its own) and descriptors. The run fails
if requests are still in flight at a tenth, or if the memory grows by more than GROWTH_BYTES_MAX
after the first half: by then as many prompts were sent as the router remembers of one replica
(CAPACITY_DEFAULT of prefix_index). What grows after that is mostly freed memory that the router
keeps for large bodies (freed_memory). A table of one run is in two_leg_kills.md.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ops.attack.kills import AttackFailed
from ops.attack.leaving_clients import LeaveStage
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
from ops.bench.memory_counts import process_sizes
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY
from tests.integration.router.test_process import a_process, prepare

GROWTH_BYTES_MAX: Final = 8 * 1024**2
ITL_S: Final = 0.001
SESSIONS: Final = 1000
STAGES: Final = (LeaveStage.SENT, LeaveStage.ANSWERED, LeaveStage.STREAMING, LeaveStage.WHOLE)


class LeavingStreams:
    """The clients of one router."""

    def __init__(self, port: int, seed: int, request: Callable[[random.Random], bytes]) -> None:
        """`request` draws the next request for a stream."""
        self._port = port
        self._draw_request = request
        self._chance = random.Random(seed)
        self.reached = dict.fromkeys(STAGES, 0)

    async def leave(self, stage: LeaveStage) -> None:
        """Send a request, and leave at a stage."""
        chance = self._chance
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._draw_request(chance))
            with suppress(asyncio.IncompleteReadError):
                if stage is not LeaveStage.SENT:
                    await reader.readuntil(b"HTTP/1.1 200 OK\r\n")
                if stage is LeaveStage.STREAMING:
                    for _ in range(chance.randrange(1, 8)):
                        await reader.readuntil(b"data: ")
                if stage is LeaveStage.WHOLE:
                    await reader.readuntil(b"data: [DONE]")
                self.reached[stage] += 1
            await asyncio.sleep(chance.uniform(0, PAUSE_S_MAX))
        finally:
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

    async def leave_often(self, count: int) -> None:
        """Leave `count` times."""
        await do_often(count, STAGES, self._chance, self.leave)


def a_chat(chance: random.Random) -> bytes:
    """Return a request with a new prompt."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{chance.getrandbits(4096):x}"}],
        "stream": True,
    }
    fields = {
        "authorization": f"Bearer {KEY}",
        "x-session-affinity": f"s{chance.randrange(SESSIONS)}",
    }
    return post_bytes("/v1/chat/completions", fields, msgspec.json.encode(body))


async def attack(count: int, seed: int) -> None:
    """Have `count` clients leave, and print the table. Raises AttackFailed."""
    node = FakeNode()
    node.itl_s = ITL_S
    with tempfile.TemporaryDirectory(prefix="leave") as name:
        async with open_node(node):
            config, port = prepare(Path(name), node)
            async with a_process(config, port) as process:
                clients, grown = LeavingStreams(port, seed, a_chat), 0
                print_head("left", "rss MiB", "anon", "descriptors")
                for tenth in range(1, 11):
                    await clients.leave_often(count // 10)
                    try:
                        await node.until(lambda: not node.running, FREE_S)
                    except TimeoutError as error:
                        raise AttackFailed(f"{node.running} requests go on") from error
                    node.bodies.clear()
                    node.request_headers.clear()
                    sizes = process_sizes(process.pid)
                    grown += sizes.anon if tenth == 10 else -sizes.anon if tenth == 5 else 0
                    memory = map(in_mib, (sizes.rss, sizes.anon))
                    print_row(tenth * (count // 10), *memory, sizes.descriptors)
    print("\n" + ", ".join(f"{stage} {times}" for stage, times in clients.reached.items()))
    if grown > GROWTH_BYTES_MAX:
        raise AttackFailed(f"the router has {grown} bytes more")


if __name__ == "__main__":
    raise SystemExit(run_attack("ops.attack.leaving_streams", 50_000, attack))
