"""Emulates the latency between cities: a TCP relay in front of each node that delays all bytes.

The source address gives the caller's city. Each direction is delayed by half the round trip between
the two cities. The first bytes of a connection are delayed by one more round trip, for the TCP
handshake, which takes no time on loopback. If one side does not read, the relay stops reading from
the other.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import uvloop

from ops.fleet.cities import CITIES, City, city_of_address, round_trip_ms

CHUNK_BYTES: Final = 64 * 1024
CHUNKS_IN_FLIGHT_MAX: Final = 64
CONNECT_TIMEOUT_S: Final = 5.0


async def relay_direction(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    delay_s: float,
    not_before: float,
) -> None:
    """Relay one direction with a delay of `delay_s`, in order, and not before `not_before`."""
    clock = asyncio.get_running_loop().time
    in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_IN_FLIGHT_MAX)

    async def receive() -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await in_flight.put((max(clock(), not_before) + delay_s, chunk))
        await in_flight.put((clock() + delay_s, b""))

    async def deliver() -> None:
        while True:
            due, chunk = await in_flight.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receive())
        tasks.create_task(deliver())


async def relay_connection(
    city: City,
    node_port: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Relay one connection to the node of `city`, as far away as its caller is."""
    caller = city_of_address(writer.get_extra_info("peername")[0])
    rtt_s = round_trip_ms(caller.pop if caller else city.pop, city.pop) / 1000
    accepted = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(city.listen_host, node_port)
    except (OSError, TimeoutError):
        # A caller sees that a node is down by a reset, one round trip after connecting.
        await asyncio.sleep(rtt_s)
        writer.transport.abort()
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            up = relay_direction(reader, far_writer, rtt_s / 2, accepted + rtt_s)
            tasks.create_task(up)
            tasks.create_task(relay_direction(far_reader, writer, rtt_s / 2, 0.0))
    except* (ConnectionError, OSError):
        # One side was reset, so the other is reset too.
        writer.transport.abort()
        far_writer.transport.abort()
    finally:
        for side in (writer, far_writer):
            side.close()
            with suppress(ConnectionError, OSError):
                await side.wait_closed()


async def serve(ports: Sequence[tuple[int, int]]) -> None:
    """Relay to the node of every city. `ports` are (WAN port, node port) in the order of CITIES."""
    servers = []
    for city, (wan_port, node_port) in zip(CITIES, ports, strict=True):

        async def on_connection(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            city: City = city,
            node_port: int = node_port,
        ) -> None:
            await relay_connection(city, node_port, reader, writer)

        servers.append(await asyncio.start_server(on_connection, city.node_host, wan_port))
    sys.stdout.write('{"ready":true}\n')
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    pairs = [(int(wan), int(node)) for wan, _, node in (a.partition(":") for a in sys.argv[1:])]
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(pairs))
