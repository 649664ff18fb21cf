"""Connections that are closed leave nothing for the garbage collector.

Full collections freeze what they have seen (`router/loops/collect_garbage.py`): what only they
could free would stay until the next walk over all objects.
"""

import gc
from collections import Counter
from pathlib import Path

import pytest

from router.dataplane.http_messages import HttpRequest
from router.dataplane.node_connection import NodeConnection
from router.dataplane.request_reader import RequestReader
from router.dataplane.server import ClientConnection
from tests.integration.router.fleet_of import a_bench
from tests.system.harness import until

CONNECTIONS = 20


async def test_closed_connections_are_freed_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_bench(tmp_path) as bench:
        monkeypatch.setattr(gc, "collect", lambda: 0)
        monkeypatch.setattr(gc, "freeze", lambda: None)
        gc.disable()
        try:
            for number in range(CONNECTIONS):
                is_stream = bool(number % 2)
                async with bench.chat(
                    stream=is_stream, max_tokens=3, headers={"connection": "close"}
                ) as response:
                    assert response.status == 200
                    await response.text()

            async def are_freed() -> bool:
                left = Counter(type(thing) for thing in gc.get_objects())
                kinds = (ClientConnection, RequestReader, HttpRequest, NodeConnection)
                return all(left[kind] <= 2 for kind in kinds)

            await until("the connections are freed", are_freed, 5.0)
        finally:
            gc.enable()
