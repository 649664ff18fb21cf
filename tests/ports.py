"""Free ports for tests, reserved for this process.

A port that the kernel assigned and that was closed may be assigned again at once. These ports are
below the kernel's range, in a block that each test process reserves for its lifetime.
"""

import socket
from collections.abc import Iterator
from typing import Final

FIRST: Final = 20_000
BLOCK: Final = 100
BLOCKS: Final = 120


def free_port() -> int:
    """Return a port on which no process listens."""
    return next(_ports)


def _ports_of_own_block() -> Iterator[int]:
    with socket.socket() as mark:
        firsts = range(FIRST, FIRST + BLOCKS * BLOCK, BLOCK)
        own = next(first for first in firsts if _can_bind(mark, first))
        while True:
            yield from (port for port in range(own + 1, own + BLOCK) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Servers set it too: old connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _can_bind(probe, port)


def _can_bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


_ports: Final = _ports_of_own_block()
