"""Resolves names to public addresses only, to prevent server-side request forgery (SSRF)."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import abc

from isochrone.service.network.name_cache import Lookup, look_up, resolve_results

_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""The only IPv6 addresses that are routed on the internet, besides those of the public NAT64."""

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses that a gateway sends on to the IPv4 address in their last 32 bits. Private gateways
have other prefixes, some with another place for it: those are never public."""


_INSIDE: Final = (
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv4Network("168.63.129.16/32"),
)
"""Addresses that lead inside some clouds, and that `is_global` takes for public: 192.0.0.0/24 (RFC
6890; in Python before 3.11.10) has Oracle's metadata of instances, the other is Azure's host."""


def refuse_private(host: str) -> None:
    """Raise OSError if `host` is an IP address outside the public internet."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return
    if not _is_public(address):
        raise OSError(f"cannot use {host}: it is not a public address")


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address, and the IPv4 address that it may carry, is public.

    A NAT64 or 6to4 gateway sends packets for such an IPv6 address on to the IPv4 address in it.
    """
    if isinstance(address, ipaddress.IPv6Address):
        carried = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            carried = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if carried is None:
            return address.is_global and address in _UNICAST
        address = carried
    is_inside = any(address in network for network in _INSIDE)
    return address.is_global and not address.is_multicast and not is_inside


class PublicResolver(abc.AbstractResolver):
    """Resolves names for an aiohttp client, which then connects to the addresses checked here.

    A literal address is not passed to a resolver: its user checks it.
    """

    def __init__(
        self, look_up: Lookup = look_up, refuse: Callable[[str], None] = refuse_private
    ) -> None:
        """`refuse` raises OSError for an address that must not be used."""
        self._look_up = look_up
        self._refuse = refuse

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[abc.ResolveResult]:
        """Return the addresses of `host`. Raises OSError if one of them is not public."""
        addresses = await self._look_up(host)
        for address in addresses:
            self._refuse(address)
        return resolve_results(host, port, addresses)

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""
