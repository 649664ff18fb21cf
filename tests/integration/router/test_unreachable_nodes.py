"""Requests to nodes that cannot be reached: each ends, and nothing of it is left in memory."""

import asyncio
import gc
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from isochrone.wire.ids import NodeId
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.exchange import AttemptFailed, NodeExchange, NodeRequest
from router.dataplane.node_connection import NodeConnection
from router.dataplane.upstream import Upstream
from tests.ports import free_port

REQUESTS = 20


async def test_a_failed_exchange_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """Cycles of thousands of failed pings made collections of 200 ms."""
    deadlines = Deadlines(time.monotonic)
    upstream = Upstream(RouterConfig(state_folder=tmp_path), deadlines, time.monotonic, None)
    address = f"http://127.0.0.1:{free_port()}"
    deadlines.start()
    gc.collect()
    gc.disable()
    try:
        for _ in range(REQUESTS):
            with pytest.raises(AttemptFailed, match="cannot reach n1"):
                await upstream.fetch(
                    NodeId("n1"), address, NodeRequest("GET", "/ping", "", b""), 5.0, 1000
                )
        await asyncio.sleep(0)
        left = Counter(type(thing) for thing in gc.get_objects())
        # The last one may be in a local variable still.
        assert left[NodeExchange] <= 1
        assert left[NodeConnection] <= 1
    finally:
        gc.enable()
        deadlines.stop()
        await upstream.close()


async def test_an_unexpected_error_of_a_dial_ends_the_request(tmp_path: Path) -> None:
    """Nothing else ends it: a connection has a deadline, and there is none yet."""

    def broken() -> socket.socket:
        raise RuntimeError("not an OSError")

    upstream = Upstream(
        RouterConfig(state_folder=tmp_path), Deadlines(time.monotonic), time.monotonic, None
    )
    upstream.in_process[NodeId("n1")] = broken
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    exchange = upstream.send(NodeId("n1"), "n1:1", NodeRequest("GET", "/ping", "", b""), 5.0, 1000)
    try:
        async with asyncio.timeout(10):
            await exchange.opened
        with pytest.raises(AttemptFailed, match="cannot reach n1"):
            exchange.response_head()
    finally:
        exchange.abandon()
        await upstream.close()
    gc.collect()
    assert "not an OSError" in str(errors)
