"""Connections are limited by the network that one client controls, and idle ones make room."""

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


class OpenConnection:
    """A connection that has been idle since a time; since None it has work."""

    def __init__(self, idle_since_s: float | None) -> None:
        self.is_idle = idle_since_s is not None
        self.idle_since_s = idle_since_s or 0.0
        self.is_closed = False

    def abort(self) -> None:
        self.is_closed = True


def test_connections_that_are_idle_for_longest_make_room_for_others() -> None:
    count = ConnectionCount(32, 100)
    is_open = [OpenConnection(None), *(OpenConnection(30.0 - number) for number in range(29))]
    for _ in is_open[:29]:
        count.add("a")
    count.close_idlest(lambda: is_open, 50.0)
    assert not any(connection.is_closed for connection in is_open), "three more fit"
    count.add("a")
    count.close_idlest(lambda: is_open, 50.0)
    assert [connection for connection in is_open if connection.is_closed] == is_open[-2:]


def test_idle_connections_are_not_looked_for_without_end() -> None:
    count, looks = ConnectionCount(16, 100), []

    def busy() -> list[OpenConnection]:
        looks.append(1)
        return [OpenConnection(None)]

    for _ in range(16):
        count.add("a")
    for now_s in (1.0, 1.01, 1.09, 1.2):
        count.close_idlest(busy, now_s)
    assert len(looks) == 2
