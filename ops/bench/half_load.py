"""What the router adds while it is half busy: requests at a fixed rate, whoever is still waiting.

`python -m ops.bench.half_load RATE [SECONDS] [ROUNDS]`. The backend itself, then our router before
it, then the compiled one where it is built, each alone at the rate, in turn. A request counts from
the moment it was due, so that a stall is seen by everyone it held up.

The client asks no event loop: those wake at whole milliseconds and would send in bursts. It polls,
and so keeps one core to itself; routers and backend share the rest.
"""

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

CONNECTIONS = 32
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

    def ask(self, due_s: float) -> None:
        """Send what was due at `due_s`."""
        self._due_s = due_s
        self.socket.send(self._request)

    def took_ms(self) -> float:
        """Take the answer, which comes in one piece; return how long it took."""
        answer = self.socket.recv(65_536)
        now_s = time.perf_counter()
        if not (answer.startswith(b"HTTP/1.1 200") and answer.endswith(backend.WHOLE)):
            raise SystemExit(f"cannot measure: answered {answer[:200]!r}")
        return 1000 * (now_s - self._due_s)


def ask_at(rate: float, seconds: float, port: int, key: str) -> list[float]:
    """Ask at `rate` a second; return how long each answer took."""
    askers = [Asker(port, key) for _ in range(CONNECTIONS)]
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
            took_ms.append(by_fd[fd].took_ms())
            idle.append(by_fd[fd])
    for asker in askers:
        asker.socket.close()
    return took_ms


def main() -> None:
    """Measure and print."""
    rate = float(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 8.0
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        os.sched_setaffinity(0, cores[1:] or cores)
        served = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        stack.enter_context(running(served, folder / "backend.log"))
        until_open(BACKEND_PORT)
        targets = [("direct", BACKEND_PORT, "x")]
        for one in contestants(Path("none"), folder)[:2]:
            log = folder / f"{one.port}.log"
            stack.enter_context(running(one.command, log, one.tree))
            until_open(one.port)
            targets.append((one.name, one.port, log.read_text().split()[0]))
        os.sched_setaffinity(0, cores[:1])
        seen: dict[str, list[list[float]]] = {}
        for _ in range(rounds):
            for who, port, key in targets:
                ask_at(rate, WARM_UP_S, port, key)
                seen.setdefault(who, []).append(sorted(ask_at(rate, seconds, port, key)))
    print("| who | answers | p50 ms | p90 ms | p99 ms | p99.9 ms |\n|---|---|---|---|---|---|")
    for who, took_ms in seen.items():
        tails = [
            median(one[int(len(one) * share)] for one in took_ms)
            for share in (0.5, 0.9, 0.99, 0.999)
        ]
        print(f"| {who} | {sum(map(len, took_ms))} | {' | '.join(f'{ms:.2f}' for ms in tails)} |")


if __name__ == "__main__":
    main()
