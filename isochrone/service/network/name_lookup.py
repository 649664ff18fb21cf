"""The event loop of a service: name lookups that hang do not keep others from connecting.

uvloop looks names up in libuv's thread pool, two at a time, and queues numeric addresses of plain
sockets behind them. While DNS hangs for some names, a process then connects to nothing, not even to
`127.0.0.1`: a router whose nodes' names hung lost its scheduler for minutes. Here numeric addresses
need no thread, and names are looked up in threads that do not delay the end of the process.
`name_cache.py` caches the results.
"""

import asyncio
import errno
import ipaddress
import socket
from collections import deque
from contextlib import suppress
from threading import Thread
from typing import Any, Final, NamedTuple

import uvloop

LOOKUPS_MAX: Final = 32
"""Lookups at the same time. One that hangs holds its thread until the resolver gives up."""

AddressInfo = tuple[Any, Any, int, str, Any]


class NameQuery(NamedTuple):
    """The arguments of a lookup."""

    host: str | bytes
    port: Any
    family: int
    type: int
    proto: int
    flags: int


class PendingLookup(NamedTuple):
    """A lookup, and the future that its caller waits for."""

    query: NameQuery
    found: asyncio.Future[list[AddressInfo]]


class ServiceLoop(uvloop.Loop):
    """uvloop's event loop with lookups of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[PendingLookup] = deque()
        self._running = 0

    async def getaddrinfo(
        self,
        host: str | bytes | None,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[AddressInfo]:
        """Return the addresses of a name; raises OSError."""
        if host is None or is_numeric(host):
            # uvloop needs no thread for a numeric address whose socket type is given.
            kind = type or socket.SOCK_STREAM
            return list(
                await super().getaddrinfo(
                    host, port, family=family, type=kind, proto=proto, flags=flags
                )
            )
        found: asyncio.Future[list[AddressInfo]] = self.create_future()
        query = NameQuery(host, port, family, type, proto, flags)
        self._pending.append(PendingLookup(query, found))
        self._start_lookups()
        try:
            return await found
        finally:
            # An error would hold this frame, and the future the error.
            del found

    def _start_lookups(self) -> None:
        while self._pending and self._running < LOOKUPS_MAX:
            pending = self._pending.popleft()
            if pending.found.done():
                continue
            # Not an executor's thread, which the interpreter waits for at its exit.
            thread = Thread(target=self._look_up, args=(pending,), name="dns", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The system has no thread left. Others may start later.
                pending.found.set_exception(OSError(errno.EAGAIN, f"cannot look up: {error}"))
            else:
                self._running += 1

    def _look_up(self, pending: PendingLookup) -> None:
        """Look a name up, in a thread."""
        answer = _answer_of(pending.query)
        with suppress(RuntimeError):  # the loop is closed
            self.call_soon_threadsafe(self._finish, pending.found, answer)

    def _finish(
        self, found: asyncio.Future[list[AddressInfo]], answer: list[AddressInfo] | Exception
    ) -> None:
        self._running -= 1
        self._start_lookups()
        if found.done():
            return
        if isinstance(answer, Exception):
            found.set_exception(answer)
        else:
            found.set_result(answer)


def _answer_of(query: NameQuery) -> list[AddressInfo] | Exception:
    """Return the addresses of a name, or the error."""
    try:
        return list(socket.getaddrinfo(*query))
    except UnicodeError:
        # A label that is empty or too long: callers expect an OSError for a name without address.
        return socket.gaierror(socket.EAI_NONAME, "not a host name")
    except (OSError, OverflowError, TypeError, ValueError) as error:
        # Its traceback would hold this thread's frames, and they the error.
        return error.with_traceback(None)


def is_numeric(host: str | bytes) -> bool:
    """Return whether a host is an IP address, with or without a scope, rather than a name."""
    text = host.decode("latin-1") if isinstance(host, bytes) else host
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
