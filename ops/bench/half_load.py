"""What the router adds while it is half busy: requests at a fixed rate, whoever is still waiting.

`python -m ops.bench.half_load RATE [SECONDS] [ROUNDS] [--connections 32] [--peers FOLDER]`. The
backend itself, then each router before it (ours, compiled too where it is built, and those in
FOLDER as relay.py takes it), alone at the rate, in turn. A request counts from the moment it was
due, so that a stall is seen by everyone it held up.

The client asks no event loop: those wake at whole milliseconds and would send in bursts. It polls,
and so keeps one core to itself; routers and backend share the rest.
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
from ops.bench.relay import PATH, PLAIN, contestants, running, until_open

BACKEND_PORT = 18101
WARM_UP_S = 2.0


class Asker:
    """One connection, blocking nobody: what was asked over it and since when it is due."""

    def __init__(self, port: int, key: str) -> None:
        body = PLAIN.encode()
        self._request = (
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._due_s = 0.0
        self._came = b""

    def ask(self, due_s: float) -> None:
        """Send what was due at `due_s`."""
        self._due_s = due_s
        self._came = b""
        self.socket.send(self._request)

    def took_ms(self) -> float | None:
        """Take what came; return how long the answer took, None where it is not whole yet."""
        part = self.socket.recv(65_536)
        now_s = time.perf_counter()
        self._came += part
        if not part or not self._came.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"cannot measure: answered {self._came[:200]!r}")
        return 1000 * (now_s - self._due_s) if self._came.endswith(backend.WHOLE) else None


def ask_at(rate: float, seconds: float, port: int, key: str, connections: int) -> list[float]:
    """Ask at `rate` a second over so many connections; return how long each answer took."""
    askers = [Asker(port, key) for _ in range(connections)]
    by_fd = {asker.socket.fileno(): asker for asker in askers}
    poll = select.epoll()
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    idle = deque(askers)
    took_ms: list[float] = []
    asked, count = 0, int(rate * seconds)
    began_s = time.perf_counter()
    while len(took_ms) < count:
        while asked < count and idle and began_s + asked / rate <= time.perf_counter():
            idle.popleft().ask(began_s + asked / rate)
            asked += 1
        for fd, _ in poll.poll(0):
            took = by_fd[fd].took_ms()
            if took is not None:
                took_ms.append(took)
                idle.append(by_fd[fd])
    for asker in askers:
        asker.socket.close()
    return took_ms


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rate", type=float)
    parser.add_argument("seconds", type=float, nargs="?", default=8.0)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--peers", type=Path, default=Path("none"))
    told = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        os.sched_setaffinity(0, cores[1:] or cores)
        served = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        stack.enter_context(running(served, folder / "backend.log"))
        until_open(BACKEND_PORT)
        targets = [("direct", BACKEND_PORT, "x")]
        for one in contestants(told.peers, folder):
            log = folder / f"{one.port}.log"
            stack.enter_context(running(one.command, log, one.tree))
            until_open(one.port)
            targets.append((one.name, one.port, log.read_text().split()[0] if one.is_ours else "x"))
        os.sched_setaffinity(0, cores[:1])
        seen: dict[str, list[list[float]]] = {}
        for _ in range(told.rounds):
            for who, port, key in targets:
                ask_at(told.rate, WARM_UP_S, port, key, told.connections)
                took_ms = ask_at(told.rate, told.seconds, port, key, told.connections)
                seen.setdefault(who, []).append(sorted(took_ms))
    print("| who | answers | p50 ms | p90 ms | p99 ms | p99.9 ms |\n|---|---|---|---|---|---|")
    for who, turns in seen.items():
        tails = [
            median(one[int(len(one) * share)] for one in turns) for share in (0.5, 0.9, 0.99, 0.999)
        ]
        print(f"| {who} | {sum(map(len, turns))} | {' | '.join(f'{ms:.2f}' for ms in tails)} |")


if __name__ == "__main__":
    main()
