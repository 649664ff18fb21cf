"""A peer whose schedulers are all down."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from isochrone.service.network import control_link
from isochrone.service.trust.identity import Authority
from isochrone.wire.peers.control import PeerRole
from tests.integration.service.test_tls import NOW, a_link, a_peer
from tests.ports import free_port
from tests.system.harness import until

ROUNDS = 4


async def test_each_scheduler_that_is_down_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reasons in turn are no news either: a line per attempt filled the logs of an outage."""
    monkeypatch.setattr(control_link, "BACKOFF_MIN_S", 0.001)
    monkeypatch.setattr(control_link, "BACKOFF_MAX_S", 0.001)
    attempts: Counter[str] = Counter()
    router = a_peer(Authority.create(tmp_path / "a", "ours", NOW), "r1", PeerRole.ROUTER)
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]

    async def never(welcome: object) -> None:
        pytest.fail("no scheduler runs")

    link = a_link(router, urls, never)
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
    assert len(logged) == len(urls)
