"""`python -m tests.chaos.packet_link`: carries IP packets between two network namespaces.

Each namespace has a TUN device, and this process delays, drops and forwards what is sent to it: a
link between two cities, for kernels without netem. Each line on its standard input sets the link:
delay, jitter (both in ms, one way) and the share of packets lost. It ends when its input does.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
IFF_TUN: Final = 0x0001
IFF_NO_PI: Final = 0x1000
PACKET_BYTES_MAX: Final = 2048
BURST_MAX: Final = 64
QUEUE_MAX: Final = 10_000
TUN_DEVICE: Final = Path("/dev/net/tun")


@dataclass
class LinkSettings:
    """How the link treats the packets of both directions."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


@dataclass
class Direction:
    """The packets on their way in one direction, in the order in which they were sent."""

    source: int
    target: int
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    last_due_s: float = 0.0

    def take(self, settings: LinkSettings, rng: random.Random) -> None:
        """Read what was sent, and lose or queue it."""
        for _ in range(BURST_MAX):
            try:
                packet = os.read(self.source, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if rng.random() < settings.loss or len(self.queue) >= QUEUE_MAX:
                continue
            due_s = time.monotonic() + settings.delay_s + rng.uniform(0.0, settings.jitter_s)
            self.last_due_s = max(due_s, self.last_due_s)
            self.queue.append((self.last_due_s, packet))

    def deliver(self, now_s: float) -> None:
        """Deliver the packets that are due."""
        while self.queue and self.queue[0][0] <= now_s:
            try:
                os.write(self.target, self.queue.popleft()[1])
            except BlockingIOError:
                return


def open_tun(namespace: str, address: str, peer: str, device: str) -> int:
    """Open a TUN device in a network namespace, with `peer` at its other end."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        tun = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(tun, TUNSETIFF, request)
        for command in (
            f"ip addr add {address}/32 peer {peer} dev {device}",
            f"ip link set {device} up mtu 1400 txqueuelen 5000",
        ):
            subprocess.run(command.split(), check=True)
        if libc.setns(own, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(there)
        os.close(own)
    return tun


def carry(directions: list[Direction], rng: random.Random) -> None:
    """Carry packets until the standard input ends."""
    settings = LinkSettings()
    sources = {direction.source: direction for direction in directions}
    while True:
        due = [direction.queue[0][0] for direction in directions if direction.queue]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([*sources, sys.stdin.fileno()], [], [], wait_s)
        for source in readable:
            if source in sources:
                sources[source].take(settings, rng)
                continue
            lines = os.read(source, 4096).decode().splitlines()
            if not lines:
                return
            delay_ms, jitter_ms, loss = map(float, lines[-1].split())
            settings = LinkSettings(delay_ms / 1000, jitter_ms / 1000, loss)
        for direction in directions:
            direction.deliver(time.monotonic())


def main() -> None:
    """Open both devices, say "up", and carry."""
    device, first, first_address, second, second_address, seed = sys.argv[1:]
    one = open_tun(first, first_address, second_address, device)
    other = open_tun(second, second_address, first_address, device)
    print("up", flush=True)
    carry([Direction(one, other), Direction(other, one)], random.Random(int(seed)))


if __name__ == "__main__":
    main()
