"""Measures the latency that a router adds at a fixed request rate (an open-loop load).

`python -m ops.bench.half_load RATE [SECONDS] [ROUNDS] [--connections 32] [--peers FOLDER] [--kib 0]
[--replicas 1] [--only NAME ...]`. The
backend alone and then each router before it (ours, also compiled if it is built, and those in
FOLDER, see relay.py) get the rate in turn. A latency counts from when the request was due, so that
a stall shows in every request that it delayed.

The client uses no event loop, because event loops wake at whole milliseconds and would send in
bursts. It polls, and so occupies one core; routers and backend share the others. Whatever else the
machine does takes that core from them and counts as latency: a burst of 10 ms once a second delays
1 % of the requests. `direct` shows it; on a machine with such a process, run this in a control
group with precedence (`cpu.shares` 262144).
"""

import argparse
import os
import select
import socket
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from ops.bench import backend
from ops.bench.relay import (
    PATH,
    LoadPattern,
    chosen,
    contestants,
    load_pattern,
    router_key,
    running,
)

BACKEND_PORT = 18101
WARM_UP_S = 2.0


class PollingConnection:
    """A non-blocking connection with at most one open request."""

    def __init__(self, port: int, key: str, body: bytes) -> None:
        self._request = (
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * len(body) + 65_536)
        self.socket.setblocking(False)
        self._due_s = 0.0
        self._received = b""

    def send(self, due_s: float) -> None:
        """Send a request that was due at `due_s`."""
        self._due_s = due_s
        self._received = b""
        if self.socket.send(self._request) != len(self._request):
            raise SystemExit("cannot measure: a request did not fit into the socket's buffer")

    def read_latency_ms(self) -> float | None:
        """Read; return the latency of the response, None while it is incomplete."""
        part = self.socket.recv(65_536)
        now_s = time.perf_counter()
        self._received += part
        if not part or not self._received.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"cannot measure: answered {self._received[:200]!r}")
        return 1000 * (now_s - self._due_s) if self._received.endswith(backend.WHOLE) else None


def send_at(rate: float, seconds: float, port: int, key: str, load: LoadPattern) -> list[float]:
    """Send `rate` requests a second over some connections; return the latencies in ms."""
    clients = [
        PollingConnection(port, key, load.bodies[number % len(load.bodies)].encode())
        for number in range(load.connections)
    ]
    by_fd = {client.socket.fileno(): client for client in clients}
    poll = select.epoll()
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    idle = deque(clients)
    latencies_ms: list[float] = []
    sent, count = 0, int(rate * seconds)
    began_s = time.perf_counter()
    while len(latencies_ms) < count:
        while sent < count and idle and began_s + sent / rate <= time.perf_counter():
            idle.popleft().send(began_s + sent / rate)
            sent += 1
        for fd, _ in poll.poll(0):
            latency_ms = by_fd[fd].read_latency_ms()
            if latency_ms is not None:
                latencies_ms.append(latency_ms)
                idle.append(by_fd[fd])
    for client in clients:
        client.socket.close()
    return latencies_ms


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rate", type=float)
    parser.add_argument("seconds", type=float, nargs="?", default=8.0)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--peers", type=Path, default=Path("none"))
    parser.add_argument("--kib", type=int, default=0, help="size of a body; 0: a short question")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="routers whose name has one of these")
    arguments = parser.parse_args()
    load = load_pattern(arguments.kib, arguments.connections, is_stream=False)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        os.sched_setaffinity(0, cores[1:] or cores)
        backend_command = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        stack.enter_context(running(backend_command, folder / "backend.log", BACKEND_PORT))
        targets = [("direct", BACKEND_PORT, "x")]
        routers = contestants(arguments.peers.absolute(), folder, arguments.replicas)
        for router in chosen(routers, arguments.only):
            log = folder / f"{router.port}.log"
            stack.enter_context(running(router.command, log, router.port, router.environment))
            targets.append((router.name, router.port, router_key(router, folder)))
        os.sched_setaffinity(0, cores[:1])
        results: dict[str, list[list[float]]] = {}
        for _ in range(arguments.rounds):
            for name, port, key in targets:
                send_at(arguments.rate, WARM_UP_S, port, key, load)
                latencies_ms = send_at(arguments.rate, arguments.seconds, port, key, load)
                results.setdefault(name, []).append(sorted(latencies_ms))
    print("| router | responses | p50 ms | p90 ms | p99 ms | p99.9 ms |\n|---|---|---|---|---|---|")
    for name, rounds in results.items():
        tails = [
            median(latencies[int(len(latencies) * share)] for latencies in rounds)
            for share in (0.5, 0.9, 0.99, 0.999)
        ]
        print(f"| {name} | {sum(map(len, rounds))} | {' | '.join(f'{ms:.2f}' for ms in tails)} |")


if __name__ == "__main__":
    main()
