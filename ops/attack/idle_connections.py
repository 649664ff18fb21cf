"""Strangers hold idle connections from four addresses; does a client at another one get an answer?

    python -m ops.attack.idle_connections [--connections 19600]

Attacks the control port of a scheduler and the public port of a router, without any key. Each
stranger sends one request and keeps its connection. Then clients at another address ask.
"""

import argparse
import asyncio
import resource
import sys
from contextlib import suppress
from typing import Final

from ops.attack.edge_router import open_edge_router
from tests.system.harness import a_fleet, until

ADDRESSES: Final = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
CLIENT_ADDRESS: Final = "127.0.0.99"
AT_ONCE: Final = 200
CLIENTS: Final = 20
TIMEOUT_S: Final = 20.0
REQUEST: Final = b"GET /healthz HTTP/1.1\r\nhost: s\r\n\r\n"


async def ask(port: int, address: str) -> asyncio.StreamWriter | None:
    """Return a connection from `address` over which a request was answered; None if it was not."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0)
            )
            writer.write(REQUEST)
            if await reader.readline():
                return writer
            writer.close()
    return None


async def attack(what: str, port: int, connections: int) -> None:
    """Hold connections, ask, and print a line."""
    strangers: list[asyncio.StreamWriter | None] = []
    for first in range(0, connections, AT_ONCE):
        address = ADDRESSES[first * len(ADDRESSES) // connections]
        strangers += await asyncio.gather(*(ask(port, address) for _ in range(AT_ONCE)))
    clients = [await ask(port, CLIENT_ADDRESS) for _ in range(CLIENTS)]
    answered = sum(client is not None for client in clients)
    opened = sum(stranger is not None for stranger in strangers)
    sys.stdout.write(
        f"{what}: {opened} connections of strangers were answered; then {answered} of {CLIENTS} "
        "clients at another address\n"
    )
    for writer in (*strangers, *clients):
        if writer is not None:
            writer.transport.abort()


async def run(connections: int) -> None:
    """Attack a scheduler, then a router."""
    async with a_fleet(comes_up=False) as fleet:
        await fleet.start_postgres()
        await fleet.start_scheduler("a")
        await until("scheduler a is active", fleet.acts)
        await attack("scheduler", fleet.ports["control-a"], connections)
    async with open_edge_router() as router:
        await attack("router", router.port, connections)


def main() -> None:
    """Read the arguments and attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=19_600)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(parser.parse_args().connections))


if __name__ == "__main__":
    main()
