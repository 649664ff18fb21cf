"""Nodes are sent each revocation once, whatever its time."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isochrone.wire.admin import RevocationView
from isochrone.wire.peers.control import PeerRole
from scheduler.loops import disconnect_revoked
from scheduler.loops.disconnect_revoked import DisconnectRevoked


class RevocationOutbox:
    """Counts how often nodes were sent their assignments."""

    def __init__(self) -> None:
        self.times = 0

    async def send_to(self, _: Sequence[str]) -> int:
        self.times += 1
        return 1


class NoPeers:
    def __iter__(self) -> Any:
        return iter(())

    def agents(self) -> list[Any]:
        return []


def revoked(name: str, at: float) -> RevocationView:
    return RevocationView(role=PeerRole.AGENT, name=name, serial="", reason="", at=at)


async def test_a_revocation_stamped_before_another_and_committed_after_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[RevocationView] = []

    @asynccontextmanager
    async def no_connection(_: Any) -> AsyncIterator[None]:
        yield None

    async def revoked_since(_: Any, since_s: float) -> list[RevocationView]:
        return found

    monkeypatch.setattr(disconnect_revoked, "using", no_connection)
    monkeypatch.setattr(disconnect_revoked, "revoked_since", revoked_since)
    outbox = RevocationOutbox()
    job = DisconnectRevoked(
        pool=cast(Any, None),
        lease=cast(Any, SimpleNamespace(is_acting=True, clock=lambda: 0.0)),
        peers=cast(Any, NoPeers()),
        assignments=cast(Any, outbox),
    )
    times = []
    later, earlier = revoked("n2", 11.0), revoked("n1", 10.0)
    for rows in ([], [later], [later], [earlier, later], [earlier, later], [later], []):
        found[:] = rows
        await job.run_once()
        times.append(outbox.times)
    assert times == [0, 1, 1, 2, 2, 2, 2]
