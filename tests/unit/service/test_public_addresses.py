"""Only addresses of the public internet are used, in whatever form they come."""

import asyncio
import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.service.network.public_addresses import PublicResolver, refuse_private

CLOUDS = ["192.0.0.0/24", "168.63.129.16/32"]
"""Reached only from within some clouds; `is_global` does not say so in every Python."""

PRIVATE = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
    *CLOUDS,
]
PRIVATE_IPV6 = [
    *("::/96", "64:ff9b:1::/48", "100::/64", "2001::/32", "2001:db8::/32", "4000::/3"),
    *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
]


def addresses_of(networks: Sequence[str]) -> st.SearchStrategy[str]:
    def within(network: str) -> st.SearchStrategy[str]:
        known = ipaddress.ip_network(network)
        return st.integers(0, known.num_addresses - 1).map(lambda number: str(known[number]))

    return st.sampled_from(networks).flatmap(within)


def forms_of(ipv4: str) -> list[str]:
    """Return the IPv4 address, and the IPv6 addresses whose packets reach it."""
    number = int(ipaddress.IPv4Address(ipv4))
    high, low = f"{number >> 16:x}", f"{number & 0xFFFF:x}"
    return [
        *(ipv4, f"::ffff:{ipv4}", f"[::ffff:{high}:{low}]", f"64:ff9b::{high}:{low}"),
        *(f"2002:{high}:{low}::1", f"[2002:{high}:{low}:ffff::]"),
    ]


@given(addresses_of(PRIVATE))
def test_a_private_address_is_refused_in_each_form(ipv4: str) -> None:
    for form in forms_of(ipv4):
        with pytest.raises(OSError, match="not a public address"):
            refuse_private(form)


@given(addresses_of(PRIVATE_IPV6))
def test_what_is_not_routed_on_the_internet_is_refused(address: str) -> None:
    with pytest.raises(OSError, match="not a public address"):
        refuse_private(address)


def is_in_a_cloud(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return any(address in ipaddress.ip_network(network) for network in CLOUDS)


@given(
    st.ip_addresses(v=4).filter(
        lambda a: a.is_global and not a.is_multicast and not is_in_a_cloud(a)
    )
)
def test_a_public_address_is_used_in_each_form(address: ipaddress.IPv4Address) -> None:
    for form in forms_of(str(address)):
        refuse_private(form)


def test_names_and_public_addresses_pass() -> None:
    for host in ("example.com", "localhost", "", "[2606:4700::1111]", "2a00:1450:4001::8"):
        refuse_private(host)


async def resolve(*addresses: str) -> list[str]:
    async def look_up(_: str) -> Sequence[str]:
        return addresses

    found = await PublicResolver(look_up).resolve("example.com", 443)
    assert {(row["hostname"], row["port"]) for row in found} == {("example.com", 443)}
    return [row["host"] for row in found]


def test_a_name_has_public_addresses_only() -> None:
    assert asyncio.run(resolve("8.8.8.8", "2606:4700::1111")) == ["8.8.8.8", "2606:4700::1111"]
    for others in (["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["fe80::1%eth0"], ["fec0::1"]):
        with pytest.raises(OSError, match="not a public address"):
            asyncio.run(resolve(*others))
