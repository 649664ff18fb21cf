"""The event loop of a service: name lookups that hang do not keep others from connecting.

uvloop looks names up in libuv's thread pool, two at a time, and queues numeric addresses of plain
sockets behind them. While DNS hangs for some names, a process then connects to nothing, not even to
`127.0.0.1`: a router whose nodes' names hang lost its scheduler for minutes. Here numeric addresses
need no thread, each name is looked up once at a time in threads of its own, and a name whose lookup
fails or hangs keeps the addresses that it had.
"""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import uvloop

THREADS_MAX: Final = 16
"""Lookups at the same time. One that hangs holds its thread until the resolver gives up."""

FRESH_S: Final = 30.0
"""How long addresses are used without another lookup."""

LOOKUP_TIMEOUT_S: Final = 2.0
"""How long a caller waits for a lookup before it uses the addresses of an earlier one."""

STALE_S: Final = 3600.0
"""How long the addresses of an earlier lookup are used where a lookup fails or hangs."""

NAMES_MAX: Final = 20_000
"""Names remembered: two for each node of a large fleet."""

Query = tuple[str | bytes | None, Any, int, int, int, int]
AddressInfo = tuple[Any, Any, int, str, Any]


class KnownAddresses(msgspec.Struct, frozen=True):
    """The result of a lookup, and its time by the loop's clock."""

    infos: list[AddressInfo]
    at_s: float


class ServiceLoop(uvloop.Loop):
    """uvloop's event loop with lookups of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._lookup_threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="dns")
        self._known: dict[Query, KnownAddresses] = {}
        self._lookups: dict[Query, asyncio.Future[list[AddressInfo]]] = {}

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
            return list(
                await super().getaddrinfo(
                    host,
                    port,
                    family=family,
                    type=type or socket.SOCK_STREAM,
                    proto=proto,
                    flags=flags,
                )
            )
        query = (host, port, family, type, proto, flags)
        known = self._known.get(query)
        if known is not None and self.time() - known.at_s < FRESH_S:
            return known.infos
        lookup = self._lookups.get(query)
        if lookup is None:
            lookup = self._lookups[query] = asyncio.ensure_future(
                self.run_in_executor(self._lookup_threads, socket.getaddrinfo, *query)
            )
            lookup.add_done_callback(lambda done: self._keep(query, done))
        usable = known if known and self.time() - known.at_s < STALE_S else None
        try:
            # Other callers wait for the same lookup: one that gives up must not cancel it.
            async with asyncio.timeout(LOOKUP_TIMEOUT_S if usable else None):
                return await asyncio.shield(lookup)
        except OSError:  # a TimeoutError is one
            if usable is None:
                raise
            return usable.infos

    def close(self) -> None:
        """Close the loop without waiting for lookups that hang."""
        self._lookup_threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _keep(self, query: Query, lookup: asyncio.Future[list[AddressInfo]]) -> None:
        self._lookups.pop(query, None)
        if lookup.cancelled() or lookup.exception() is not None:
            return
        if len(self._known) >= NAMES_MAX:
            self._known.clear()
        self._known[query] = KnownAddresses(lookup.result(), self.time())


def is_numeric(host: str | bytes) -> bool:
    """Say whether a host is an IP address rather than a name."""
    text = host.decode("latin-1") if isinstance(host, bytes) else host
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
