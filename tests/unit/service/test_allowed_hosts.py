"""Which Host headers a server accepts: no stranger's name, whatever it points to."""

import pytest

from isochrone.service.trust.allowed_hosts import HostAllowList


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:7000", "10.1.2.3:80", "[::1]:7000", "[2001:db8::1]"),
        *("localhost", "LOCALHOST:7000", "localhost.:7000", "demo.localhost:1"),
        *("scheduler-a:7000", "scheduler", "admin.example.com", "Admin.Example.com.:443"),
    ],
)
def test_addresses_own_names_and_those_of_the_operator_are_allowed(host: str) -> None:
    assert HostAllowList(["admin.example.com"]).allows(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:7000", "127.0.0.1.evil.example", "127.0.0.1.nip.io:7000"),
        *("localhost.evil.example", "xadmin.example.com", "admin.example.com.evil.example", ""),
        *(":7000", "evil.example:80:7000", "[evil.example]:1", "[::1", "user@evil.example"),
        *("evil.example\t", "7f000001.rbndr.us", "0x7f.1.evil.example", "[::1].evil.example"),
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert not HostAllowList(["admin.example.com"]).allows(host)


def test_an_operator_may_leave_the_check_to_a_proxy() -> None:
    assert HostAllowList(["*"]).allows("evil.example")
