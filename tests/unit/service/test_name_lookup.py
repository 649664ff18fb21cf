"""Lookups of names that hang keep nobody else from connecting."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from isochrone.service.name_lookup import LOOKUP_TIMEOUT_S, THREADS_MAX, ServiceLoop, is_numeric

ADDRESS = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9000))
GENEROUS_S = 60.0


class NameServer:
    """Stands in for the system's resolver: names that begin with "hang" get no answer."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.released = threading.Event()
        self.is_down = False

    def getaddrinfo(self, host: str, *_rest: Any) -> list[Any]:
        self.asked[host] += 1
        if self.is_down or host.startswith("hang"):
            self.released.wait(GENEROUS_S)
        if self.is_down or host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        return [ADDRESS]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.released.set()


def run(main: Any) -> None:
    uvloop.run(asyncio.wait_for(main, GENEROUS_S), loop_factory=ServiceLoop)


def test_a_numeric_address_is_connected_to_while_more_names_hang_than_there_are_threads(
    names: NameServer,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(lambda _r, writer: writer.close(), "127.0.0.1", 0)
        hanging = [
            asyncio.create_task(loop.getaddrinfo(f"hang-{number}", 9000))
            for number in range(4 * THREADS_MAX)
        ]
        while len(names.asked) < THREADS_MAX:
            await asyncio.sleep(0)
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, server.sockets[0].getsockname())
        assert not any(task.done() for task in hanging)
        names.released.set()
        await asyncio.gather(*hanging)
        server.close()

    run(main())


def test_callers_share_one_lookup_of_a_name_and_its_result(names: NameServer) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        callers = [asyncio.create_task(loop.getaddrinfo("hang", 9000)) for _ in range(50)]
        await asyncio.sleep(0)
        callers[0].cancel()
        names.released.set()
        found = await asyncio.gather(*callers[1:])
        assert found == [[ADDRESS]] * 49
        assert await loop.getaddrinfo("hang", 9000) == [ADDRESS]
        assert names.asked == {"hang": 1}

    run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_name_keeps_its_addresses_while_dns_fails_or_hangs(
    names: NameServer, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("isochrone.service.name_lookup.FRESH_S", 0.0)
    monkeypatch.setattr("isochrone.service.name_lookup.LOOKUP_TIMEOUT_S", 0.01 * LOOKUP_TIMEOUT_S)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await loop.getaddrinfo("node", 9000) == [ADDRESS]
        names.is_down = True
        if not hangs:
            names.released.set()
        assert await loop.getaddrinfo("node", 9000) == [ADDRESS]
        assert names.asked["node"] == 2
        names.released.set()
        with pytest.raises(socket.gaierror):
            await loop.getaddrinfo("another", 9000)

    run(main())


def test_a_name_that_does_not_exist_fails_and_is_looked_up_again(names: NameServer) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            with pytest.raises(socket.gaierror):
                await loop.getaddrinfo("nowhere", 9000)
        assert names.asked["nowhere"] == 2

    run(main())


def test_addresses_are_told_from_names() -> None:
    numeric: list[str | bytes] = ["127.0.0.1", "::1", "fe80::1%eth0", b"10.0.0.1"]
    assert [is_numeric(host) for host in numeric] == [True] * 4
    assert not any(map(is_numeric, ["localhost", "n00001", "1.2.3.4.example"]))
