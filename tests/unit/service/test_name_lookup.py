"""Lookups of names that hang keep nobody else from connecting."""

import asyncio
import gc
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from isochrone.service.network.name_lookup import LOOKUPS_MAX, ServiceLoop, is_numeric

ADDRESS = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9000))
GENEROUS_S = 60.0


class NameServer:
    """Stands in for the system's resolver: names that begin with "hang" get no answer."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.started = threading.Semaphore(0)
        self.released = threading.Event()

    def getaddrinfo(self, host: str, *_rest: Any) -> list[Any]:
        self.asked[host] += 1
        self.started.release()
        if host.startswith("hang"):
            self.released.wait(GENEROUS_S)
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        return [ADDRESS]

    async def wait_for(self, lookups: int) -> None:
        """Wait until so many lookups have begun."""
        for _ in range(lookups):
            assert await asyncio.to_thread(self.started.acquire, timeout=GENEROUS_S)


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
            for number in range(4 * LOOKUPS_MAX)
        ]
        await names.wait_for(LOOKUPS_MAX)
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, server.sockets[0].getsockname())
        assert not any(task.done() for task in hanging)
        names.released.set()
        await asyncio.gather(*hanging)
        server.close()

    run(main())


def test_a_lookup_that_was_given_up_holds_its_thread_until_it_ends(names: NameServer) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        hanging = [
            asyncio.create_task(loop.getaddrinfo(f"hang-{number}", 9000))
            for number in range(LOOKUPS_MAX)
        ]
        await names.wait_for(LOOKUPS_MAX)
        for task in hanging:
            task.cancel()
        waiting = asyncio.create_task(loop.getaddrinfo("node", 9000))
        await asyncio.gather(*hanging, return_exceptions=True)
        assert not names.asked["node"]
        names.released.set()
        assert await waiting == [ADDRESS]

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


def test_failed_lookups_are_freed_without_the_garbage_collector(names: NameServer) -> None:
    """A router of a large fleet asks for the names of dead nodes again and again."""

    def errors_left() -> int:
        return sum(type(thing) is socket.gaierror for thing in gc.get_objects())

    async def main() -> None:
        for _ in range(20):
            with pytest.raises(socket.gaierror):
                await asyncio.get_running_loop().getaddrinfo("nowhere", 9000)
        # The threads may still be ending, and pytest may hold the last error.
        for _ in range(1_000):
            if errors_left() <= 1:
                return
            await asyncio.to_thread(int)
        raise AssertionError(f"{errors_left()} errors of lookups are left")

    gc.collect()
    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("host", ["a..b", "..", 64 * "x"])
def test_what_is_no_host_name_fails_as_a_name_does(host: str) -> None:
    """Connections expect an OSError: any other would end the tasks that dial."""

    async def main() -> None:
        with pytest.raises(socket.gaierror):
            await asyncio.get_running_loop().getaddrinfo(host, 9000)

    run(main())


def test_names_are_looked_up_again_after_threads_had_run_out(
    names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that could not start was counted as one that runs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", fail)
            for number in range(LOOKUPS_MAX):
                with pytest.raises(OSError, match="can't start new thread"):
                    await loop.getaddrinfo(f"node-{number}", 9000)
        assert await loop.getaddrinfo("node", 9000) == [ADDRESS]

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run(main())
