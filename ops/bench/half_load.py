"""What the router adds while it is half busy: requests at a fixed rate, whoever is still waiting.

`python -m ops.bench.half_load RATE [SECONDS]`. Half the rate goes to the backend itself and half
through the router, in turn, each over connections of its own; a request counts from the moment it
should have been sent, so that a stall is seen by everyone it held up.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import uvloop

from ops.bench.relay import PATH, PLAIN, running, until_open

BACKEND_PORT = 18141
PORT = 18142
CONNECTIONS = 32


class Asker(asyncio.Protocol):
    """One connection that asks when told and notes how long each answer took."""

    def __init__(self, key: str, took_ms: list[float]) -> None:
        body = PLAIN.encode()
        self._request = (
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._took_ms = took_ms
        self._due: list[float] = []
        self._held = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, due_s: float) -> None:
        """Send what was due at `due_s`; one that waits goes when the one before is over."""
        self._due.append(due_s)
        if len(self._due) == 1:
            self._send()

    def data_received(self, data: bytes) -> None:
        """Note a whole answer: it ends with its JSON object."""
        self._held += data
        if not self._held.endswith(b"}"):
            return
        self._held = b""
        self._took_ms.append(1000 * (time.perf_counter() - self._due.pop(0)))
        if self._due:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._transport.write(self._request)


async def ask_at(rate: float, seconds: float, key: str) -> dict[int, list[float]]:
    """Ask both ports in turn at `rate` a second; return the times by port."""
    loop = asyncio.get_running_loop()
    times: dict[int, list[float]] = {BACKEND_PORT: [], PORT: []}
    askers: dict[int, list[Asker]] = {}
    for port, took_ms in times.items():
        askers[port] = []
        for _ in range(CONNECTIONS):
            _, asker = await loop.create_connection(
                lambda took_ms=took_ms: Asker(key, took_ms),  # type: ignore[misc]
                "127.0.0.1",
                port,
            )
            askers[port].append(asker)
    began_s = time.perf_counter()
    for number in range(int(rate * seconds)):
        due_s = began_s + number / rate
        wait_s = due_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        port = PORT if number % 2 else BACKEND_PORT
        askers[port][(number // 2) % CONNECTIONS].ask(due_s)
    await asyncio.sleep(1)
    return times


async def main() -> None:
    """Measure and print."""
    rate, seconds = float(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        ports = [str(PORT), str(BACKEND_PORT)]
        routed = [sys.executable, "-m", "ops.bench.bench_router", *ports, name]
        with running(served, folder / "backend.log"), running(routed, folder / "router.log"):
            until_open(BACKEND_PORT)
            until_open(PORT)
            await asyncio.sleep(1)
            key = (folder / "router.log").read_text().split()[0]
            await ask_at(200, 2, key)
            for port, took_ms in (await ask_at(rate, seconds, key)).items():
                took_ms.sort()
                p50, p99 = took_ms[len(took_ms) // 2], took_ms[int(len(took_ms) * 0.99)]
                who = "router" if port == PORT else "direct"
                print(f"{who}: {len(took_ms)} answers, p50 {p50:.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    uvloop.run(main())
