"""Names: looked up once at a time, and known by their last addresses while DNS does not answer."""

import asyncio
import logging
import socket
from collections.abc import Sequence

import pytest

from isochrone.service.network.name_cache import (
    FRESH_S,
    NAMES_MAX,
    WAIT_S,
    CachedResolver,
    NameCache,
)


class Dns:
    """A name server whose answers wait for `answers`, or that fails."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = ("10.0.0.1",)
        self.queries: list[str] = []
        self.fails = False
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def look_up(self, host: str) -> Sequence[str]:
        self.queries.append(host)
        self.asked.set()
        await self.answers.wait()
        if self.fails:
            raise OSError(f"cannot resolve {host}")
        return self.addresses


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_addresses_are_used_for_a_while_and_then_asked_for_again() -> None:
    dns, clock = Dns(), Clock()
    names = NameCache(dns.look_up, clock)
    for _ in range(3):
        assert await names.addresses("n1") == ("10.0.0.1",)
    assert dns.queries == ["n1"]
    dns.addresses = ("10.0.0.2", "10.0.0.2", "fd00::2")
    clock.now_s += FRESH_S
    assert await names.addresses("n1") == ("10.0.0.2", "fd00::2")


async def test_an_address_is_no_name() -> None:
    names = NameCache(Dns().look_up, Clock())
    for address in ("192.0.2.1", "::1"):
        assert await names.addresses(address) == (address,)


async def test_many_wait_for_one_lookup_and_none_cancels_it_for_the_others() -> None:
    dns = Dns()
    dns.answers.clear()
    names = NameCache(dns.look_up, Clock())
    waiting = [asyncio.create_task(names.addresses("n1")) for _ in range(5)]
    await dns.asked.wait()
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    dns.answers.set()
    assert await asyncio.gather(*waiting[1:]) == [("10.0.0.1",)] * 4
    assert dns.queries == ["n1"]


async def test_a_lookup_that_hangs_delays_connections_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dns, clock = Dns(), Clock()
    names = NameCache(dns.look_up, clock)
    await names.addresses("n1")
    dns.answers.clear()
    clock.now_s += FRESH_S
    first = asyncio.create_task(names.addresses("n1"))
    dns.asked.clear()
    await dns.asked.wait()
    assert not first.done()
    clock.now_s += WAIT_S
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert await names.addresses("n1") == ("10.0.0.1",)
        dns.addresses = ("10.0.0.9",)
        dns.answers.set()
        assert await first == ("10.0.0.9",)
    assert len(dns.queries) == 2
    told = [record.getMessage() for record in caplog.records]
    assert [("last addresses" in text, "again" in text) for text in told] == [
        (True, False),
        (False, True),
    ]


async def test_a_name_that_fails_keeps_its_addresses_and_is_asked_for_later() -> None:
    dns, clock = Dns(), Clock()
    names = NameCache(dns.look_up, clock)
    await names.addresses("n1")
    dns.fails = True
    clock.now_s += FRESH_S
    for _ in range(3):
        assert await names.addresses("n1") == ("10.0.0.1",)
    assert len(dns.queries) == 2
    dns.fails, dns.addresses = False, ("10.0.0.3",)
    clock.now_s += FRESH_S
    assert await names.addresses("n1") == ("10.0.0.3",)


@pytest.mark.parametrize("addresses", [(), None])
async def test_a_name_that_was_never_resolved_is_an_error(addresses: Sequence[str] | None) -> None:
    dns = Dns()
    dns.fails, dns.addresses = addresses is None, addresses or ()
    names = NameCache(dns.look_up, Clock())
    for _ in range(2):
        with pytest.raises(OSError, match="cannot resolve n1"):
            await names.addresses("n1")
    dns.fails, dns.addresses = False, ("10.0.0.1",)
    assert await names.addresses("n1") == ("10.0.0.1",)


async def test_the_oldest_of_too_many_names_is_forgotten() -> None:
    dns = Dns()
    names = NameCache(dns.look_up, Clock())
    for number in range(NAMES_MAX + 1):
        await names.addresses(f"n{number}")
    dns.queries.clear()
    for host in ("n1", "n0"):
        await names.addresses(host)
    assert dns.queries == ["n0"]


async def test_closing_ends_the_lookups() -> None:
    dns = Dns()
    dns.answers.clear()
    names = NameCache(dns.look_up, Clock())
    waiting = asyncio.create_task(names.addresses("n1"))
    await dns.asked.wait()
    await names.aclose()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_an_aiohttp_client_gets_addresses_of_both_families() -> None:
    dns = Dns()
    dns.addresses = ("10.0.0.1", "fd00::1")
    resolver = CachedResolver(NameCache(dns.look_up, Clock()))
    found = await resolver.resolve("n1", 80)
    assert [(one["host"], one["port"], one["family"]) for one in found] == [
        ("10.0.0.1", 80, socket.AF_INET),
        ("fd00::1", 80, socket.AF_INET6),
    ]
    await resolver.close()
