"""Measures the memory of thousands of idle streams in one router process.

`python -m ops.bench.streams [STREAMS]`. Each stream has its own connection and gets a token every
12 s. Memory is the RSS of the router process, before the streams open and with all of them open.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import psutil
import uvloop

from ops.bench.relay import running

BACKEND_PORT = 18131
PORT = 18132
BODY = (
    b'{"model":"bench","stream":true,"messages":[{"role":"user","content":"pace=12000ms slowly"}]}'
)
AT_ONCE = 200


class StreamClient(asyncio.Protocol):
    """A client that counts the bytes of its stream and keeps none."""

    def __init__(self, key: bytes, begun: asyncio.Semaphore) -> None:
        self._key = key
        self._begun = begun
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        cast(asyncio.Transport, transport).write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
            b"content-length: %d\r\n\r\n%s" % (self._key, len(BODY), BODY)
        )

    def data_received(self, data: bytes) -> None:
        """Count bytes; the first ones let the next stream open."""
        if not self.received:
            self._begun.release()
        self.received += len(data)


async def open_streams(count: int, key: bytes) -> list[StreamClient]:
    """Open streams, AT_ONCE at a time."""
    loop = asyncio.get_running_loop()
    begun = asyncio.Semaphore(AT_ONCE)
    clients = []
    for _ in range(count):
        await begun.acquire()
        _, client = await loop.create_connection(
            lambda: StreamClient(key, begun), "127.0.0.1", PORT
        )
        clients.append(client)
    # All permits are back once every stream has begun.
    for _ in range(AT_ONCE):
        await begun.acquire()
    return clients


async def measure(count: int) -> None:
    """Open the streams, measure, and print."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backend_command = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        router_command = [
            sys.executable,
            "-m",
            "ops.bench.bench_router",
            str(PORT),
            str(BACKEND_PORT),
            name,
        ]
        with (
            running(backend_command, folder / "backend.log", BACKEND_PORT),
            running(router_command, folder / "router.log", PORT) as router,
        ):
            await asyncio.sleep(1)
            key = (folder / "router.log").read_bytes().split()[0]
            await open_streams(50, key)
            before = router.memory_info().rss
            began = time.monotonic()
            clients = await open_streams(count, key)
            took_s = time.monotonic() - began
            await asyncio.sleep(2)
            after = router.memory_info().rss
            cpu = psutil.Process(router.pid).cpu_percent(interval=3)
            print(
                f"{count} streams open in {took_s:.1f} s; RSS {before / 2**20:.0f} -> "
                f"{after / 2**20:.0f} MiB, {(after - before) / count / 1024:.1f} KiB a stream; "
                f"CPU while idle {cpu:.0f} %; "
                f"all have received data: {all(client.received for client in clients)}"
            )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("streams", type=int, nargs="?", default=5000, metavar="STREAMS")
    uvloop.run(measure(parser.parse_args().streams))


if __name__ == "__main__":
    main()
