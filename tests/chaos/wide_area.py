"""Network namespaces joined by links with delay, jitter and packet loss, and a name server.

A namespace stands for a city. Its `access` address is on a connection without faults, by which a
test reaches the processes in it; between the namespaces there are only the links.
"""

import asyncio
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, cast

import pytest

from tests.chaos.packet_link import TUN_DEVICE
from tests.system.harness import ROOT

ACCESS: Final = "198.18"
WIDE: Final = "198.19"
"""Both are reserved for benchmarks, and in no use."""

BLOCKS: Final = 250
CONFIGURATION: Final = Path("/etc/netns")
"""Files in it replace those of /etc for the processes of a namespace."""

FIRST_PORT: Final = 50_000
USUAL_PORTS: Final = 10_000
DNS_PORT: Final = 53
DNS_HEADER: Final = struct.Struct("!6H")
A_RECORD: Final = struct.Struct("!3HIH4s")
SAME_NAME: Final = 0xC00C
"""Refers to the name in the question."""

ANSWER: Final = 0x8580
NO_SUCH_NAME: Final = 3
TYPE_A: Final = 1


def run(command: str) -> None:
    """Run an `ip` command; raises CalledProcessError."""
    subprocess.run(command.split(), check=True, capture_output=True)


class NameServer:
    """Answers with the addresses in `names`, and not at all while it hangs."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.hangs = False
        self.unanswered = 0

    def answer(self, query: bytes) -> bytes | None:
        """Return the answer to a query, or None while no query is answered."""
        if self.hangs:
            self.unanswered += 1
            return None
        labels, end = [], DNS_HEADER.size
        while length := query[end]:
            labels.append(query[end + 1 : end + 1 + length].decode())
            end += 1 + length
        question = query[DNS_HEADER.size : end + 5]
        (kind,) = struct.unpack_from("!H", query, end + 1)
        found = self.names.get(".".join(labels))
        record = b""
        if found is not None and kind == TYPE_A:
            record = A_RECORD.pack(SAME_NAME, TYPE_A, 1, 0, 4, socket.inet_aton(found))
        (identity,) = struct.unpack_from("!H", query)
        status = ANSWER | (NO_SUCH_NAME if found is None else 0)
        return DNS_HEADER.pack(identity, status, 1, bool(record), 0, 0) + question + record


class NameServerSocket(asyncio.DatagramProtocol):
    """One address at which a name server answers."""

    def __init__(self, server: NameServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data)
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)


class Link:
    """A link between two namespaces."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: Sequence[str]) -> None:
        self.first, self.second = addresses
        self._process = process

    def set(self, *, delay_ms: float = 0.0, jitter_ms: float = 0.0, loss: float = 0.0) -> None:
        """Treat packets so from now on, in both directions."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay_ms} {jitter_ms} {loss}\n".encode())

    async def close(self) -> None:
        """End the link."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class WideArea:
    """Namespaces and links."""

    def __init__(self, block: int) -> None:
        self.names = NameServer()
        self.access: dict[str, str] = {}
        """By namespace: the address at which the test reaches it."""
        self.links: dict[str, Link] = {}
        self._block = block
        self._transports: list[asyncio.BaseTransport] = []

    def prefix(self, city: str) -> tuple[str, ...]:
        """Return the command that runs another one in a city's namespace."""
        return ("ip", "netns", "exec", self._namespace(city))

    async def add_city(self, city: str) -> None:
        """Make a namespace whose name server is ours."""
        namespace, number = self._namespace(city), len(self.access)
        outside = f"{ACCESS}.{self._block}.{4 * number + 1}"
        inside = f"{ACCESS}.{self._block}.{4 * number + 2}"
        device = f"iso{self._block}v{number}"
        run(f"ip netns add {namespace}")
        self.access[city] = inside
        run(f"ip link add {device} type veth peer name access netns {namespace}")
        run(f"ip addr add {outside}/30 dev {device}")
        run(f"ip link set {device} up")
        for command in (f"addr add {inside}/30 dev access", "link set access up", "link set lo up"):
            run(f"ip -n {namespace} {command}")
        folder = CONFIGURATION / namespace
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text(f"nameserver {outside}\n")
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: NameServerSocket(self.names), (outside, DNS_PORT)
        )
        self._transports.append(transport)

    async def join(self, first: str, second: str) -> Link:
        """Lay a link between two cities; it is kept by the name of the second."""
        number = len(self.links)
        addresses = [f"{WIDE}.{self._block}.{2 * number + end}" for end in (1, 2)]
        arguments = (
            f"wide{number}",
            *(self._namespace(first), addresses[0], self._namespace(second), addresses[1]),
            str(number),
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.packet_link", *arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        if await process.stdout.readline() != b"up\n":
            pytest.skip("needs TUN devices: see the error above")
        link = self.links[second] = Link(process, addresses)
        return link

    def set_ports(self, city: str, count: int) -> None:
        """Leave a city's connections this many local ports to each address."""
        last = FIRST_PORT + max(0, count - 1)
        reserved = str(FIRST_PORT) if count == 0 else ""
        for name, text in (
            ("ip_local_port_range", f"{FIRST_PORT} {last}"),
            ("ip_local_reserved_ports", reserved),
        ):
            write = f"echo '{text}' > /proc/sys/net/ipv4/{name}"
            subprocess.run([*self.prefix(city), "sh", "-c", write], check=True)

    async def close(self) -> None:
        """Remove links and namespaces."""
        for transport in self._transports:
            transport.close()
        for link in self.links.values():
            await link.close()
        for city in self.access:
            namespace = self._namespace(city)
            run(f"ip netns del {namespace}")
            shutil.rmtree(CONFIGURATION / namespace, ignore_errors=True)

    def _namespace(self, city: str) -> str:
        return f"iso{self._block}-{city}"


def free_block() -> int:
    """Return a number that no other test process of this machine uses in its addresses."""
    used = {path.name.partition("-")[0] for path in Path("/run/netns").glob("iso*-*")}
    first = os.getpid()
    return next(n % BLOCKS for n in range(first, first + BLOCKS) if f"iso{n % BLOCKS}" not in used)


@asynccontextmanager
async def a_wide_area(cities: Sequence[str]) -> AsyncIterator[WideArea]:
    """Join the first of `cities` to each other one; skip the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not TUN_DEVICE.exists():
        pytest.skip("needs root, iproute2 and /dev/net/tun")
    area = WideArea(free_block())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(area.close)
        try:
            for city in cities:
                await area.add_city(city)
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"needs network namespaces: {error}")
        for city in cities[1:]:
            await area.join(cities[0], city)
        yield area
