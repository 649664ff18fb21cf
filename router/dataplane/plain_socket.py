"""The descriptor under a transport."""

import asyncio


def plain_socket(transport: asyncio.Transport) -> int:
    """Return the descriptor of a transport's socket; -1 if it has none, or TLS is on it."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("sslcontext") is not None:
        return -1
    descriptor: int = socket.fileno()
    return descriptor
