"""Thousands of open streams in one router process: what each costs in memory while it idles.

`python -m ops.bench.streams [STREAMS]`. Each stream has a connection of its own and gets a token
every 12 s; memory is the router process's RSS, before they open and with all open.
"""

import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import psutil
import uvloop

from ops.bench.relay import running, until_open

BACKEND_PORT = 18131
PORT = 18132
BODY = (
    b'{"model":"bench","stream":true,"messages":[{"role":"user","content":"pace=12000ms slowly"}]}'
)
AT_ONCE = 200


class Listener(asyncio.Protocol):
    """A client that counts the bytes of its stream and keeps none."""

    def __init__(self, key: bytes, begun: asyncio.Semaphore) -> None:
        self._key = key
        self._begun = begun
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.Transport, transport).write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n"
            b"content-length: %d\r\n\r\n%s" % (self._key, len(BODY), BODY)
        )

    def data_received(self, data: bytes) -> None:
        """Count; the first bytes make room for the next stream to begin."""
        if not self.received:
            self._begun.release()
        self.received += len(data)


async def open_streams(count: int, key: bytes) -> list[Listener]:
    """Open so many streams, a few hundred at once."""
    loop = asyncio.get_running_loop()
    begun = asyncio.Semaphore(AT_ONCE)
    listeners = []
    for _ in range(count):
        await begun.acquire()
        _, listener = await loop.create_connection(lambda: Listener(key, begun), "127.0.0.1", PORT)
        listeners.append(listener)
    # As many permits as at first: every stream has begun.
    for _ in range(AT_ONCE):
        await begun.acquire()
    return listeners


async def main() -> None:
    """Open them, look, and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        routed = [
            sys.executable,
            "-m",
            "ops.bench.bench_router",
            str(PORT),
            str(BACKEND_PORT),
            name,
        ]
        with (
            running(served, folder / "backend.log"),
            running(routed, folder / "router.log") as router,
        ):
            until_open(BACKEND_PORT)
            until_open(PORT)
            await asyncio.sleep(1)
            key = (folder / "router.log").read_bytes().split()[0]
            await open_streams(50, key)
            before = router.memory_info().rss
            began = time.monotonic()
            listeners = await open_streams(count, key)
            took_s = time.monotonic() - began
            await asyncio.sleep(2)
            after = router.memory_info().rss
            cpu = psutil.Process(router.pid).cpu_percent(interval=3)
            print(
                f"{count} streams open in {took_s:.1f} s; RSS {before / 2**20:.0f} -> "
                f"{after / 2**20:.0f} MiB, {(after - before) / count / 1024:.1f} KiB a stream; "
                f"CPU while idle {cpu:.0f} %; all alive: {all(x.received for x in listeners)}"
            )


if __name__ == "__main__":
    uvloop.run(main())
