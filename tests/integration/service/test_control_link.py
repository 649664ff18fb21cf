"""A peer whose schedulers are down, or hang."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from isochrone.service.network import control_link
from isochrone.service.network.http_server import serve_http
from isochrone.service.network.name_cache import FRESH_S, NameCache
from isochrone.service.trust.identity import Authority
from isochrone.wire import codec
from isochrone.wire.ids import ClusterId, Epoch
from isochrone.wire.peers.control import Challenge, PeerRole, Welcome
from tests.integration.service.test_tls import NOW, a_link, a_peer
from tests.ports import free_port
from tests.system.harness import until

ROUNDS = 4


async def welcome_nobody(welcome: object) -> None:
    pytest.fail("no scheduler runs")


async def test_each_scheduler_that_is_down_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reasons in turn are no news either: a line per attempt filled the logs of an outage."""
    monkeypatch.setattr(control_link, "BACKOFF_MIN_S", 0.001)
    monkeypatch.setattr(control_link, "BACKOFF_MAX_S", 0.001)
    attempts: Counter[str] = Counter()
    router = a_peer(Authority.create(tmp_path / "a", "ours", NOW), "r1", PeerRole.ROUTER)
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]

    link = a_link(router, urls, welcome_nobody)
    serve_connection = link._serve_connection

    async def count(*given: object) -> None:
        attempts[str(given[1])] += 1
        await serve_connection(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(link, "_serve_connection", count)

    async def dialled() -> bool:
        return attempts[urls[1]] >= ROUNDS

    with caplog.at_level(logging.WARNING):
        dialling = asyncio.create_task(link.run())
        await until("each was dialled some times", dialled, 10.0)
        dialling.cancel()
        with suppress(asyncio.CancelledError):
            await dialling
    logged = [record for record in caplog.records if "no connection" in record.message]
    assert [record.__dict__["fields"] for record in logged] == [
        {"scheduler": url, "reason": "Connection refused"} for url in urls
    ]


async def test_an_old_address_of_a_scheduler_is_logged_and_looked_up_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has moved, and DNS says so late: an operator must see which address it was."""
    monkeypatch.setattr(control_link, "BACKOFF_MAX_S", 0.001)
    addresses = ["127.0.0.9"]

    async def look_up(_: str) -> list[str]:
        return list(addresses)

    clock = partial(next, itertools.count(0.0, 2 * FRESH_S))
    monkeypatch.setattr(control_link, "NameCache", lambda: NameCache(look_up, clock))
    router = a_peer(Authority.create(tmp_path / "a", "ours", NOW), "r1", PeerRole.ROUTER)

    def logged() -> list[str]:
        records = [record for record in caplog.records if "no connection" in record.message]
        return [record.__dict__["fields"]["addresses"] for record in records]

    async def is_said() -> bool:
        return logged() == ["127.0.0.9"]

    async def is_found() -> bool:
        return logged() == ["127.0.0.9", "127.0.0.1"]

    async with serve_http(web.Application(), "127.0.0.1", 0) as port:
        link = a_link(router, [f"http://scheduler.test:{port}"], welcome_nobody)
        dialling = asyncio.create_task(link.run())
        await until("the old address is logged", is_said, 10.0)
        addresses[:] = ["127.0.0.1"]
        await until("the new one is dialled", is_found, 10.0)
        dialling.cancel()
        with suppress(asyncio.CancelledError):
            await dialling


async def test_a_url_with_the_wrong_scheme_is_refused_with_what_to_change(tmp_path: Path) -> None:
    """The reason was what OpenSSL says of the first bytes."""
    router = a_peer(Authority.create(tmp_path / "a", "ours", NOW), "r1", PeerRole.ROUTER)
    async with serve_http(web.Application(), "127.0.0.1", 0) as port:
        link = a_link(router, [f"https://127.0.0.1:{port}"], welcome_nobody)

        async def is_refused() -> bool:
            return bool(link.last_refusal)

        dialling = asyncio.create_task(link.run())
        await until("the connection is refused", is_refused, 10.0)
        dialling.cancel()
        with suppress(asyncio.CancelledError):
            await dialling
    assert "if it serves without TLS, write the URL with http:" in link.last_refusal


async def test_after_a_scheduler_that_hangs_another_one_is_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hung one was dialled again, and each attempt to connect took ten seconds."""
    monkeypatch.setattr(control_link, "SILENCE_S", 0.4)
    router = a_peer(Authority.create(tmp_path / "a", "ours", NOW), "r1", PeerRole.ROUTER)
    dialled: list[str] = []
    welcomed: list[object] = []

    async def note(welcome: object) -> None:
        welcomed.append(welcome)

    async def serve(request: web.Request) -> web.WebSocketResponse:
        dialled.append(str(request.url.origin()))
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        messages = (
            Challenge(protocol=codec.PROTOCOL, cluster_id=ClusterId("c"), nonce=b"n"),
            Welcome(cluster_id=ClusterId("c"), epoch=Epoch(1)),
        )
        for message in messages:
            await socket.send_bytes(codec.encode(message))
        # It reads, and never answers a ping.
        async for _ in socket:
            pass
        return socket

    app = web.Application()
    app.router.add_get("/v1/router", serve)
    async with (
        serve_http(app, "127.0.0.1", 0) as first,
        serve_http(app, "127.0.0.1", 0) as second,
    ):
        urls = [f"http://127.0.0.1:{port}" for port in (first, second)]
        dialling = asyncio.create_task(a_link(router, urls, note).run())
        await until("four connections were lost", has_dialled(dialled, 4), 20.0)
        dialling.cancel()
        with suppress(asyncio.CancelledError):
            await dialling
    assert welcomed
    assert dialled[:4] == [*itertools.islice(itertools.cycle(urls), 4)]


def has_dialled(dialled: list[str], count: int) -> Callable[[], Awaitable[bool]]:
    async def has() -> bool:
        return len(dialled) >= count

    return has
