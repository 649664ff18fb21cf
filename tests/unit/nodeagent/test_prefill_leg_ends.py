"""The prefill leg of a request whose engine dies, and is replaced, while the request waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.decide.requests.prefill_leg import TransferRate
from nodeagent.disaggregation.kv_fetch import PrefixFetcher
from nodeagent.disaggregation.two_legs import LegRequest, PrefillLeg, PrefillPeers

REPLICAS = [
    PeerReplica(ReplicaId(name), NodeId("n"), "http://n", 100, 10, 100) for name in ("d", "p")
]


class ClosedSession:
    """An engine's session, closed after `answers` requests have found no engine."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self.closed = not answers

    def get(self, path: str) -> AbstractAsyncContextManager[Any]:
        return self._request()

    def delete(self, path: str) -> AbstractAsyncContextManager[Any]:
        return self._request()

    def _request(self) -> AbstractAsyncContextManager[Any]:
        if self.closed:
            raise RuntimeError("Session is closed")
        self._answers -= 1
        self.closed = not self._answers
        raise aiohttp.ServerDisconnectedError


class LateEngine:
    """An engine that has not read the request yet when it is first named."""

    closed = False

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown
        self.has_begun = False
        self.is_asked = asyncio.Event()

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=404)

    @asynccontextmanager
    async def delete(self, path: str) -> AsyncIterator[Any]:
        self.unknown -= 1
        self.is_asked.set()
        self.has_begun = self.unknown < 0
        yield SimpleNamespace(status=204 if self.has_begun else 404)


def a_leg(engine: object) -> PrefillLeg:
    async def announce(replica_id: ReplicaId) -> None:
        raise AssertionError("no replica may be tried")

    request = LegRequest(
        transfer="f" * 32, path="/v1/completions", body=b"{}", sent={}, replicas=REPLICAS,
        load=cast(Any, None), announce=announce,
    )  # fmt: skip
    return PrefillLeg(
        cast(aiohttp.ClientSession, engine),
        cast(PrefillPeers, None),
        TransferRate(),
        request,
        lambda: 0.0,
        cast(PrefixFetcher, None),
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.disaggregation.two_legs.BEGIN_PAUSE_S", 0.0)


async def test_a_leg_ends_without_an_error_once_its_engine_is_replaced() -> None:
    for answers in range(3):
        leg = a_leg(ClosedSession(answers))
        await leg._task
        await leg.close()
        assert leg.received is None


async def test_a_request_that_its_engine_reads_late_is_told_to_begin() -> None:
    """It would wait for its KV forever, and its agent would kill the engine for that."""
    for unknown in (0, 1, 30):
        engine = LateEngine(unknown)
        leg = a_leg(engine)
        await leg._task
        assert engine.has_begun
        await leg.close()


async def test_a_leg_whose_request_has_ended_waits_for_no_engine() -> None:
    """Else its request counts as in flight, without a token, and the agent kills the engine."""
    engine = LateEngine(unknown=1_000_000)
    leg = a_leg(engine)
    await engine.is_asked.wait()
    asked = engine.unknown
    await leg.close()
    assert not engine.has_begun
    assert engine.unknown >= asked - 1
