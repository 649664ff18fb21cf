"""1,000 slow connections at once: heads, bodies and readers (C1).

A router cuts them off at its limits, serves other clients meanwhile, and takes little memory.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY
from tests.integration.router.test_process import BODY, a_process, prepare

CONNECTIONS: Final = 1000
LIMIT_S: Final = 2.0
"""After which the router cuts each of them off: 10, 30 and 20 s by default."""

RECEIVE_BYTES: Final = 4096
PADDING_BYTES: Final = 60_000
"""Of a frame. A reader is slow only once the kernel's buffers are full: some megabytes, so that few
of the clients are readers."""

READERS_SHARE: Final = 40

GROWTH_MAX_BYTES: Final = 64 << 20
OTHERS_MIN: Final = 50
"""Answers to other clients while the slow ones are connected."""

END_S: Final = 60.0
HEAD: Final = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"authorization: Bearer {KEY}\r\n"
)
STREAM: Final = json.dumps({**BODY, "stream": True, "max_tokens": 4000})


class PaddingNode(FakeNode):
    """Sends large frames with short tokens: a router keeps the text of a stream."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {**super()._head(kind), "padding": PADDING_BYTES * "x"}


class SlowClient:
    """A client that sends the beginning of a request, then a byte at a time; or reads nothing."""

    def __init__(self, begins: str, drips: bytes) -> None:
        self._begins = begins
        self._drips = drips
        self.is_cut_off = False

    async def run(self, port: int) -> None:
        """Go on until the router closes the connection."""
        end = socket.socket()
        end.setblocking(False)
        # So that what the router can write ahead is little, and soon written.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=end, limit=RECEIVE_BYTES)
        try:
            writer.write(self._begins.encode())
            with suppress(OSError):
                while not reader.at_eof():
                    if self._drips:
                        writer.write(self._drips)
                        await writer.drain()
                        with suppress(TimeoutError):
                            await asyncio.wait_for(reader.read(RECEIVE_BYTES), LIMIT_S / 4)
                    else:
                        # Nothing is read until the router gives up: then this fails.
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(LIMIT_S / 4)
            self.is_cut_off = True
        finally:
            writer.transport.abort()


def slow_clients() -> Sequence[SlowClient]:
    """Return the slow clients, one in READERS_SHARE of which reads nothing."""
    body = f"{HEAD}content-length: 4000\r\n\r\n{{"
    reads_nothing = f"{HEAD}content-length: {len(STREAM)}\r\n\r\n{STREAM}"
    heads_and_bodies = ((HEAD, b"x"), (body, b" "))
    return [
        SlowClient(*heads_and_bodies[number % 2])
        if number % READERS_SHARE
        else SlowClient(reads_nothing, b"")
        for number in range(CONNECTIONS)
    ]


@asynccontextmanager
async def connected(clients: Sequence[SlowClient], port: int) -> AsyncIterator[None]:
    """Run the clients."""
    running = [asyncio.create_task(client.run(port)) for client in clients]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_a_thousand_slow_connections_are_cut_off_while_others_are_served(
    tmp_path: Path,
) -> None:
    node = PaddingNode()
    async with open_node(node):
        config, port = prepare(tmp_path, node, tokens_in_flight_max=10**9)
        limits = ("head_timeout_s", "body_timeout_s", "write_timeout_s")
        config.write_text(config.read_text() + "".join(f"{x} = {LIMIT_S}\n" for x in limits))
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with (
            a_process(config, port) as process,
            aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
        ):

            async def ask() -> None:
                async with http.post(url, json={**BODY, "max_tokens": 2}) as response:
                    text = await response.text()
                    assert response.status == 200 and "t1" in text, text

            await ask()
            watched = psutil.Process(process.pid)
            before, descriptors = watched.memory_info().rss, watched.num_fds()
            clients, answered, most = slow_clients(), 0, before
            async with asyncio.timeout(END_S), connected(clients, port):
                while answered < OTHERS_MIN or not all(one.is_cut_off for one in clients):
                    await ask()
                    answered += 1
                    most = max(most, watched.memory_info().rss)
                    await asyncio.sleep(0.02)
            assert most - before < GROWTH_MAX_BYTES
            async with asyncio.timeout(END_S):
                while watched.num_fds() > descriptors + 4 or node.running:
                    await asyncio.sleep(0.05)
            await ask()
