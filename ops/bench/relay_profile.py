"""Profiles a request in the router: calls and CPU time, by file.

    python -m ops.bench.relay_profile [--requests 4000] [--connections 16] [--stream] [--top 25]
        [--kib 0] [--routes 1] [--handoffs named | reported] [--only-time]

The router of `bench_router` runs in this process; the backend and the client are processes of their
own. The requests are sent twice: without a profiler, for the CPU time of this process, and under
cProfile, for the calls. The number of calls hardly depends on the load of the machine and is the
most reliable figure. Time under a profiler only shows shares.

Bodies have `--kib` KiB, those of `ops.bench.relay`; 0 is a short question. With `--only-time` there
is no second run under the profiler.

With `--handoffs` each request may be handed to a peer replica (use two or more routes): with
`named` none is, with `reported` each is and the node says so before it answers.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
from collections import defaultdict
from functools import partial
from itertools import cycle
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, cast

import uvloop

from ops.bench import backend
from ops.bench.bench_router import KEY, identity, route_table
from ops.bench.relay import PATH, load_pattern, running
from router.app import open_router
from router.config import RouterConfig

BACKEND_PORT = 18151
FAST_TOKENS_PER_S = 1e6
SLOW_TOKENS_PER_S = 100.0
"""A rate so low that the router sends peer replicas to the node."""

ROOT = Path(__file__).parent.parent.parent


class LoopingClient(asyncio.Protocol):
    """A connection that sends its request again after each response."""

    def __init__(self, request: bytes, end: bytes, left: list[int], over: asyncio.Event) -> None:
        self._request = request
        self._end = end
        self._left = left
        self._over = over
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Send again, until enough responses have come."""
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"cannot profile: answered {data[:200]!r}")
        if not data.endswith(self._end):
            return
        self._left[0] -= 1
        if self._left[0] <= 0:
            self._over.set()
        elif self._transport is not None:
            self._transport.write(self._request)


def _same(client: LoopingClient) -> LoopingClient:
    return client


async def send_requests(arguments: argparse.Namespace) -> None:
    """Send requests until all are answered."""
    port, kib = arguments.client, arguments.kib
    end = b"0\r\n\r\n" if arguments.stream else backend.WHOLE[-16:]
    left, over = [arguments.requests], asyncio.Event()
    loop = asyncio.get_running_loop()
    bodies = load_pattern(kib, arguments.connections, is_stream=arguments.stream).bodies
    for _, body in zip(range(arguments.connections), cycle(bodies), strict=False):
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client = LoopingClient((head + body).encode(), end, left, over)
        await loop.create_connection(partial(_same, client), "127.0.0.1", port)
    await over.wait()


async def drive(port: int, arguments: argparse.Namespace) -> None:
    """Run a client process."""
    command = ["-m", "ops.bench.relay_profile", "--client", str(port)]
    command += ["--requests", str(arguments.requests), "--connections", str(arguments.connections)]
    command += ["--kib", str(arguments.kib)]
    if arguments.stream:
        command.append("--stream")
    client = await asyncio.create_subprocess_exec(sys.executable, *command)
    if await client.wait():
        raise SystemExit("cannot profile: the client failed")


def file_name(file: str) -> str:
    """Return a file's name for the report."""
    path = Path(file)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return path.name if file.startswith("/") else "built in"


def report(stats: Any, requests: int, top: int) -> None:
    """Print calls and shares by file, and the most expensive functions."""
    calls: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, count, own_s, _, _) in stats.items():
        calls[file_name(file)] += count
        own[file_name(file)] += own_s
    total_s = sum(own.values())
    print("\n| file | calls | share of time |\n|---|---|---|")
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
        print(f"{count / requests:7.2f} {own_s / total_s:6.1%}  {file_name(file)}:{line} {name}")


async def profile(arguments: argparse.Namespace) -> None:
    """Measure without a profiler, then with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = RouterConfig(
            state_folder=folder / "state", port=0, parse_bytes_per_key_per_s=1 << 40
        )
        server = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        if arguments.handoffs == "reported":
            server.append("r-001")
        with running(server, folder / "backend.log", BACKEND_PORT):
            async with open_router(config, identity(folder)) as app:
                rate = SLOW_TOKENS_PER_S if arguments.handoffs else FAST_TOKENS_PER_S
                app.fleet.adopt(route_table(BACKEND_PORT, arguments.routes, rate))
                await drive(app.port, arguments)
                before = getrusage(RUSAGE_SELF)
                await drive(app.port, arguments)
                after = getrusage(RUSAGE_SELF)
                user_us = 1e6 * (after.ru_utime - before.ru_utime) / arguments.requests
                system_us = 1e6 * (after.ru_stime - before.ru_stime) / arguments.requests
                print(
                    f"{user_us + system_us:.0f} us of CPU a request: {user_us:.0f} user, "
                    f"{system_us:.0f} system"
                )
                if arguments.only_time:
                    return
                profiler = cProfile.Profile()
                profiler.enable()
                await drive(app.port, arguments)
                profiler.disable()
    report(cast(Any, pstats.Stats(profiler)).stats, arguments.requests, arguments.top)


def main() -> None:
    """Run the profile, or the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--kib", type=int, default=0)
    parser.add_argument("--only-time", action="store_true")
    parser.add_argument("--routes", type=int, default=1)
    parser.add_argument("--handoffs", choices=("named", "reported"))
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        uvloop.run(send_requests(arguments))
    else:
        uvloop.run(profile(arguments))


if __name__ == "__main__":
    main()
