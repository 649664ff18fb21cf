"""The distance between the cities: a TCP relay in front of each node that holds bytes back.

The caller's city is told by its source address; each direction is delayed by half the round trip
between the two cities, and the first bytes of a connection by one more round trip, the handshake
that a relay on loopback would otherwise hide. Order and bytes are kept; a side that does not read
stops the other from being read.
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


async def carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    delay_s: float,
    not_before: float,
) -> None:
    """Carry one direction: what arrived at `t` leaves at `t + delay_s`, and never out of order."""
    clock = asyncio.get_running_loop().time
    flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_IN_FLIGHT_MAX)

    async def take_off() -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await flying.put((max(clock(), not_before) + delay_s, chunk))
        await flying.put((clock() + delay_s, b""))

    async def land() -> None:
        while True:
            due, chunk = await flying.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(take_off())
        tasks.create_task(land())


async def relay(
    city: City,
    door_port: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Relay one connection to the node of `city`, as far away as its caller is."""
    caller = city_of_address(writer.get_extra_info("peername")[0])
    rtt_s = round_trip_ms(caller.pop if caller else city.pop, city.pop) / 1000
    accepted = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(city.door_host, door_port)
    except (OSError, TimeoutError):
        # What a caller sees of a node that is down: a reset, one round trip after dialling.
        await asyncio.sleep(rtt_s)
        writer.transport.abort()
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            up = carry(reader, far_writer, rtt_s / 2, accepted + rtt_s)
            tasks.create_task(up)
            tasks.create_task(carry(far_reader, writer, rtt_s / 2, 0.0))
    except* (ConnectionError, OSError):
        # One side broke: the other must see it too, and break is what it sees.
        writer.transport.abort()
        far_writer.transport.abort()
    finally:
        for side in (writer, far_writer):
            side.close()
            with suppress(ConnectionError, OSError):
                await side.wait_closed()


async def serve(ports: Sequence[tuple[int, int]]) -> None:
    """Stand in front of the node of every city: (WAN port, door port) in the order of CITIES."""
    servers = []
    for city, (wan_port, door_port) in zip(CITIES, ports, strict=True):

        async def on_connection(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            city: City = city,
            door_port: int = door_port,
        ) -> None:
            await relay(city, door_port, reader, writer)

        servers.append(await asyncio.start_server(on_connection, city.node_host, wan_port))
    sys.stdout.write('{"ready":true}\n')
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    pairs = [(int(wan), int(door)) for wan, _, door in (a.partition(":") for a in sys.argv[1:])]
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(pairs))
