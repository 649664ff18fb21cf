"""Ports that nobody else takes before the one they are given to listens, nor while it is away.

A port that the kernel gave and that was let go may be anybody's a moment later. These lie below
those that it gives out, in a block that each process has to itself for as long as it lives.
"""

import socket
from collections.abc import Iterator
from typing import Final

FIRST: Final = 20_000
BLOCK: Final = 100
BLOCKS: Final = 120


def free_port() -> int:
    """Return a port on which nobody listens."""
    return next(_ports)


def _of_one_block() -> Iterator[int]:
    with socket.socket() as mark:
        firsts = range(FIRST, FIRST + BLOCKS * BLOCK, BLOCK)
        own = next(first for first in firsts if _takes(mark, first))
        while True:
            yield from (port for port in range(own + 1, own + BLOCK) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection of the port's last life is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _takes(probe, port)


def _takes(end: socket.socket, port: int) -> bool:
    try:
        end.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


_ports: Final = _of_one_block()
