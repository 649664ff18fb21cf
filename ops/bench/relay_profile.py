"""Where a request's time goes in the router: calls, and CPU, by part.

    python -m ops.bench.relay_profile [--requests 4000] [--connections 16] [--stream] [--top 25]

The router of `bench_router` runs in this process; the backend and the client that drives it over
loopback are processes of their own. The requests come twice: first without a profiler, for the CPU
time of this process, then under cProfile, for the calls. Calls hardly depend on what else the
machine does: they are the figure to steer by. Time under a profiler only shows how it is shared.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, cast

import uvloop

from ops.bench import backend
from ops.bench.bench_router import KEY, identity, table
from ops.bench.relay import PATH, PLAIN, STREAM, running, until_open
from router.app import open_router
from router.config import RouterConfig

BACKEND_PORT = 18151
ROOT = Path(__file__).parent.parent.parent


class Asker(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, request: bytes, end: bytes, left: list[int], over: asyncio.Event) -> None:
        self._request = request
        self._end = end
        self._left = left
        self._over = over
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Ask again, until enough was asked."""
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"cannot profile: answered {data[:200]!r}")
        if not data.endswith(self._end):
            return
        self._left[0] -= 1
        if self._left[0] <= 0:
            self._over.set()
        elif self._transport is not None:
            self._transport.write(self._request)


async def ask(port: int, requests: int, connections: int, *, stream: bool) -> None:
    """Have so many requests answered."""
    body = (STREAM if stream else PLAIN).encode()
    request = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    end = b"0\r\n\r\n" if stream else backend.WHOLE[-16:]
    left, over = [requests], asyncio.Event()
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Asker(request, end, left, over), "127.0.0.1", port)
    await over.wait()


async def drive(port: int, arguments: argparse.Namespace) -> None:
    """Let a client process ask."""
    command = ["-m", "ops.bench.relay_profile", "--ask", str(port)]
    command += ["--requests", str(arguments.requests), "--connections", str(arguments.connections)]
    if arguments.stream:
        command.append("--stream")
    client = await asyncio.create_subprocess_exec(sys.executable, *command)
    if await client.wait():
        raise SystemExit("cannot profile: the client failed")


def part_of(file: str) -> str:
    """Return which part of the router a file is."""
    path = Path(file)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return path.name if file.startswith("/") else "built in"


def report(stats: Any, requests: int, top: int) -> None:
    """Print calls and shares by file, and the functions that cost most."""
    calls: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, count, own_s, _, _) in stats.items():
        calls[part_of(file)] += count
        own[part_of(file)] += own_s
    total_s = sum(own.values())
    print("\n| part | calls | share of time |\n|---|---|---|")
    for part in sorted(own, key=own.__getitem__, reverse=True):
        if calls[part] >= requests / 2:
            print(f"| {part} | {calls[part] / requests:.1f} | {own[part] / total_s:.1%} |")
    python = sum(count for part, count in calls.items() if part != "built in")
    print(
        f"\n{python / requests:.1f} Python calls a request, {sum(calls.values()) / requests:.1f}"
        " with those of C functions\n"
    )
    ranked = sorted(stats.items(), key=lambda item: item[1][2], reverse=True)
    for (file, line, name), (_, count, own_s, _, _) in ranked[:top]:
        print(f"{count / requests:7.2f} {own_s / total_s:6.1%}  {part_of(file)}:{line} {name}")


async def profile(arguments: argparse.Namespace) -> None:
    """Measure without a profiler, then with one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = RouterConfig(state_folder=folder / "state", port=0)
        server = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        with running(server, folder / "backend.log"):
            until_open(BACKEND_PORT)
            async with open_router(config, identity(folder)) as house:
                house.fleet.adopt(table(BACKEND_PORT, arguments.routes))
                await drive(house.port, arguments)
                before = getrusage(RUSAGE_SELF)
                await drive(house.port, arguments)
                after = getrusage(RUSAGE_SELF)
                user_us = 1e6 * (after.ru_utime - before.ru_utime) / arguments.requests
                system_us = 1e6 * (after.ru_stime - before.ru_stime) / arguments.requests
                print(
                    f"{user_us + system_us:.0f} us of CPU a request: {user_us:.0f} user, "
                    f"{system_us:.0f} system"
                )
                profiler = cProfile.Profile()
                profiler.enable()
                await drive(house.port, arguments)
                profiler.disable()
    report(cast(Any, pstats.Stats(profiler)).stats, arguments.requests, arguments.top)


def main() -> None:
    """Profile, or be the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--routes", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--ask", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        uvloop.run(
            ask(arguments.ask, arguments.requests, arguments.connections, stream=arguments.stream)
        )
    else:
        uvloop.run(profile(arguments))


if __name__ == "__main__":
    main()
