"""Connections are limited by the network that one client controls."""

import pytest

from isochrone.service.network.connection_count import ConnectionCount, network_of


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_the_network_of_an_address(address: str, network: str) -> None:
    assert network_of(address) == network


def test_all_addresses_of_an_ipv6_network_share_one_limit() -> None:
    count = ConnectionCount(100, 3)
    added = [count.add(network_of(f"2001:db8::{number:x}")) for number in range(5)]
    assert added == [True] * 3 + [False] * 2
    assert count.add(network_of("2001:db8:0:1::1"))
