"""What the control port logs while Postgres hangs: each peer repeats what was not written."""

import logging
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.service.failure_log import REPEAT_S
from isochrone.wire.ids import BootId, Epoch, Generation, NodeId, RouterId
from isochrone.wire.peers.report import Report
from isochrone.wire.peers.usage import RoundTrips
from scheduler.api.control.agents import AgentEndpoint
from scheduler.api.control.routers import RouterEndpoint
from scheduler.state.lease_state import LeaseState

PEERS = 100


class HangingPool:
    @asynccontextmanager
    async def acquire(self, *, timeout: float) -> Any:
        raise TimeoutError
        yield


class Server:
    """Gives the endpoint the message of each peer, once a second for two minutes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.messages: dict[str, Any] = {}

    async def serve(self, _request: Any, _role: Any, _kind: Any, handle: Any) -> None:
        while self.now_s < 2 * REPEAT_S:
            for name, message in self.messages.items():
                peer = SimpleNamespace(
                    name=name, boot_id=BootId("b"), pop="ams", has_reported=False
                )
                await handle(peer, message)
            self.now_s += 1.0


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.message, record.__dict__["fields"]) for record in caplog.records]


def twice(message: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines of the first minute and the second."""
    times = PEERS * int(REPEAT_S)
    return [
        (message, {"reason": "TimeoutError"}),
        (message, {"reason": "TimeoutError", "times_since_last_logged": times}),
    ]


async def test_routers_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    server: Any = Server()
    pool: Any = HangingPool()
    unused: Any = None
    endpoint = RouterEndpoint(
        server=server,
        intake=pool,
        routes=unused,
        nudge_place=unused,
        key_use=unused,
        clock=lambda: server.now_s,
    )
    for number in range(PEERS):
        name = RouterId(f"router-{number}")
        server.messages[name] = RoundTrips(router_id=name, rows=())
    with caplog.at_level(logging.WARNING):
        await endpoint.handle(unused)
    assert logged(caplog) == twice("batch not written")


async def test_agents_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    server: Any = Server()
    pool: Any = HangingPool()
    unused: Any = None
    heartbeats: Any = SimpleNamespace(record=lambda _: None)
    endpoint = AgentEndpoint(
        server=server,
        pool=unused,
        intake=pool,
        authority=unused,
        lease=LeaseState(holder="scheduler-1", ttl_s=6.0, clock=lambda: server.now_s),
        heartbeats=heartbeats,
        pulses=unused,
        admission=unused,
        assignments=unused,
        routes=unused,
        nudge_place=unused,
    )
    for number in range(PEERS):
        name = NodeId(f"node-{number}")
        server.messages[name] = Report(
            node_id=name,
            boot_id=BootId("b"),
            seq=1,
            generation=Generation(0),
            epoch=Epoch(1),
            address="http://10.0.0.1:9000",
            devices=(),
        )
    with caplog.at_level(logging.WARNING):
        await endpoint.handle(unused)
    assert logged(caplog) == twice("report not written")
