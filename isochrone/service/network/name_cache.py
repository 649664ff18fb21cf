"""Resolves host names, and keeps using their last addresses while DNS does not answer.

A connection needs an address, not an answer of DNS at that moment. A name server that hangs must
not split a fleet whose machines are all reachable. A wrong address does no harm, because TLS checks
the name of the peer and not where it is.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from aiohttp import abc

from isochrone.service.network.name_lookup import is_numeric

log = logging.getLogger(__name__)

FRESH_S: Final = 10.0
"""For this time addresses are used without another lookup, and a failed name is not looked up."""

WAIT_S: Final = 0.5
"""The longest wait for the lookup of a name with known addresses, from the lookup's start."""

NAMES_MAX: Final = 10_000

Lookup = Callable[[str], Awaitable[Sequence[str]]]


async def look_up(host: str) -> Sequence[str]:
    """Return the addresses of `host` as the system resolves them. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(slots=True, eq=False)
class KnownName:
    """The last known addresses of one name, and its lookup in progress."""

    addresses: Sequence[str] = ()
    fresh_until_s: float = float("-inf")
    started_s: float = 0.0
    lookup: asyncio.Task[None] | None = None
    is_stale: bool = False
    """The last lookup failed or is late, which was logged."""


class NameCache:
    """The addresses of host names. A name is looked up once at a time, however many ask."""

    def __init__(self, look_up: Lookup = look_up, clock: Callable[[], float] = monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._look_up = look_up
        self._clock = clock
        self._names: OrderedDict[str, KnownName] = OrderedDict()

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the addresses of `host`, at least one. Raises OSError if none was ever known."""
        if is_numeric(host):
            return (host,)
        name = self._names.setdefault(host, KnownName())
        self._names.move_to_end(host)
        now_s = self._clock()
        if name.addresses and now_s < name.fresh_until_s:
            return name.addresses
        if name.lookup is None:
            name.started_s = now_s
            name.lookup = asyncio.create_task(self._refresh(host, name), name=f"look up {host}")
            # All callers may have given up waiting. Reading the error here keeps asyncio from
            # logging it.
            name.lookup.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._forget_oldest()
        # Others wait for the lookup too: it is not cancelled with one of them.
        if not name.addresses:
            await asyncio.shield(name.lookup)
            return name.addresses
        wait_s = name.started_s + WAIT_S - now_s
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(max(0.0, wait_s)):
                await asyncio.shield(name.lookup)
                return name.addresses
        self._note_stale(host, name)
        return name.addresses

    def known(self, host: str) -> Sequence[str]:
        """Return the last addresses of a name; empty if there are none, or for an address."""
        name = self._names.get(host)
        return name.addresses if name is not None else ()

    async def aclose(self) -> None:
        """Cancel the lookups."""
        lookups = [name.lookup for name in self._names.values() if name.lookup is not None]
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)

    async def _refresh(self, host: str, name: KnownName) -> None:
        try:
            found = tuple(dict.fromkeys(await self._look_up(host)))
            if not found:
                raise OSError(f"cannot resolve {host}: it has no address")
            name.addresses = found
            if name.is_stale:
                name.is_stale = False
                log.info("a name is resolved again", extra={"fields": {"host": host}})
        except OSError:
            if not name.addresses:
                raise
            self._note_stale(host, name)
        finally:
            name.fresh_until_s = self._clock() + FRESH_S
            name.lookup = None

    def _note_stale(self, host: str, name: KnownName) -> None:
        if not name.is_stale:
            name.is_stale = True
            fields = {"host": host, "addresses": ", ".join(name.addresses)}
            log.warning("DNS does not resolve a name: using its last addresses",
                        extra={"fields": fields})  # fmt: skip

    def _forget_oldest(self) -> None:
        while len(self._names) > NAMES_MAX:
            host, name = next(iter(self._names.items()))
            if name.lookup is not None:
                self._names.move_to_end(host)
                return
            del self._names[host]


class CachedResolver(abc.AbstractResolver):
    """Resolves names for an aiohttp client by a NameCache, whose owner closes it."""

    def __init__(self, names: NameCache) -> None:
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[abc.ResolveResult]:
        """Return the addresses of `host`. Raises OSError."""
        return resolve_results(host, port, await self._names.addresses(host))

    async def close(self) -> None:
        """Do nothing: the cache belongs to another."""


def resolve_results(host: str, port: int, addresses: Sequence[str]) -> list[abc.ResolveResult]:
    """Return the addresses of `host` as an aiohttp client takes them."""
    return [
        {
            "hostname": host,
            "host": address,
            "port": port,
            "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
            "proto": 0,
            "flags": socket.AI_NUMERICHOST,
        }
        for address in addresses
    ]
