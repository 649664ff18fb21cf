"""Let the clients of a router leave fifty thousand streams: does it keep anything?

    python -m ops.attack.leaving_streams [--count 50000] [--seed 1]

A router process before a fake node. Each client leaves at a stage drawn from the seed: once its
request is sent, with the head of the answer, in mid-stream, or at the end. The prompts are new. The
table shows after each tenth the router's memory (rss; anon, its own) and descriptors. The run fails
if requests are still in flight at a tenth, or if the memory grows by more than GROWTH_BYTES_MAX
after the first half: by then as many prompts were sent as the router remembers of one replica
(CAPACITY_DEFAULT of prefix_index). Among what grows after that are cycles of requests that ran
during a garbage collection: the router frees them only once it has hundreds of thousands of objects
(collect_garbage). The table that one run printed is in two_leg_kills.md.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from ops.attack.kills import AttackFailed, end_in_order
from ops.attack.leaving_clients import AT_ONCE, FREE_S, PAUSE_S_MAX, LeaveStage
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

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._chance = random.Random(seed)
        self.reached = dict.fromkeys(STAGES, 0)

    def _request(self) -> bytes:
        chance = self._chance
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{chance.getrandbits(4096):x}"}],
            "stream": True,
        }
        content = msgspec.json.encode(body)
        lines = {
            "host": "r",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "authorization": f"Bearer {KEY}",
            "x-session-affinity": f"s{chance.randrange(SESSIONS)}",
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + content

    async def leave(self, stage: LeaveStage) -> None:
        """Send a request, and leave at a stage."""
        chance = self._chance
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._request())
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
        """Leave `count` times, AT_ONCE at a time."""
        left = [self._chance.choice(STAGES) for _ in range(count)]

        async def leave_next() -> None:
            while left:
                await self.leave(left.pop())

        await asyncio.gather(*(leave_next() for _ in range(AT_ONCE)))


async def attack(count: int, seed: int) -> None:
    """Have `count` clients leave, and print the table. Raises AttackFailed."""
    node = FakeNode()
    node.itl_s = ITL_S
    with tempfile.TemporaryDirectory(prefix="leave") as name:
        async with open_node(node):
            config, port = prepare(Path(name), node)
            async with a_process(config, port) as process:
                clients, grown = LeavingStreams(port, seed), 0
                print("| left | rss MiB | anon | descriptors |\n|---|---|---|---|")
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
                    print(
                        f"| {tenth * (count // 10)} | {sizes.rss / 2**20:.1f}"
                        f" | {sizes.anon / 2**20:.1f} | {sizes.descriptors} |",
                        flush=True,
                    )
    print("\n" + ", ".join(f"{stage} {times}" for stage, times in clients.reached.items()))
    if grown > GROWTH_BYTES_MAX:
        raise AttackFailed(f"the router has {grown} bytes more")


def main() -> int:
    """Read the arguments and attack; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.attack.leaving_streams")
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments: Any = parser.parse_args()
    end_in_order()
    try:
        asyncio.run(attack(arguments.count, arguments.seed))
    except AttackFailed as failure:
        sys.stdout.write(f"failed: {failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
