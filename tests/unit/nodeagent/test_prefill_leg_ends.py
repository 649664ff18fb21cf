"""The prefill leg of a request whose engine dies, and is replaced, while the request waits."""

from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import aiohttp

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


async def test_a_leg_ends_without_an_error_once_its_engine_is_replaced() -> None:
    async def announce(replica_id: ReplicaId) -> None:
        raise AssertionError("no replica may be tried")

    for answers in range(3):
        request = LegRequest(
            transfer="f" * 32, path="/v1/completions", body=b"{}", sent={}, replicas=REPLICAS,
            load=cast(Any, None), announce=announce,
        )  # fmt: skip
        leg = PrefillLeg(
            cast(aiohttp.ClientSession, ClosedSession(answers)),
            cast(PrefillPeers, None),
            TransferRate(),
            request,
            lambda: 0.0,
            cast(PrefixFetcher, None),
        )
        await leg._task
        await leg.close()
        assert leg.received is None
