"""Revoked peers are disconnected together; nodes are sent each revocation, whatever its time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isochrone.service.clock import utc_now
from isochrone.wire.admin import RevocationView
from isochrone.wire.peers.control import PeerRole, RegistrationRefused
from scheduler.loops import disconnect_revoked
from scheduler.loops.disconnect_revoked import DisconnectRevoked

NOW = utc_now()


class RevocationOutbox:
    """Counts how often nodes were sent their assignments."""

    def __init__(self) -> None:
        self.times = 0

    async def send_to(self, _: Sequence[str]) -> int:
        self.times += 1
        return 1


class RevokedPeers:
    """Peers whose refusals end together: one after the other, none would."""

    def __init__(self, *names: str) -> None:
        self._all_begun = asyncio.Barrier(max(1, len(names)))
        certificate = SimpleNamespace(serial="1", issued_at=NOW, expires_at=NOW)
        self._peers = [
            SimpleNamespace(
                role=PeerRole.AGENT, name=name, certificate=certificate, refuse=self._refuse
            )
            for name in names
        ]

    def __iter__(self) -> Any:
        return iter(self._peers)

    def agents(self) -> list[Any]:
        return []

    async def _refuse(self, _: RegistrationRefused) -> None:
        await self._all_begun.wait()


def revoked(name: str, at: float) -> RevocationView:
    return RevocationView(role=PeerRole.AGENT, name=name, serial="", reason="", at=at)


def a_job(
    monkeypatch: pytest.MonkeyPatch, found: list[RevocationView], *names: str
) -> tuple[DisconnectRevoked, RevocationOutbox]:
    """Return the job with these peers; it reads `found` as the revocations."""

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
        peers=cast(Any, RevokedPeers(*names)),
        assignments=cast(Any, outbox),
    )
    return job, outbox


async def test_revoked_peers_that_read_nothing_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("n1", "n2", "n3")
    found = [revoked(name, NOW.timestamp() + 1.0) for name in names]
    job, _ = a_job(monkeypatch, found, *names)
    async with asyncio.timeout(5.0):
        assert (await job.run_once()).peers == len(names)


async def test_a_revocation_stamped_before_another_and_committed_after_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[RevocationView] = []
    job, outbox = a_job(monkeypatch, found)
    times = []
    later, earlier = revoked("n2", 11.0), revoked("n1", 10.0)
    for rows in ([], [later], [later], [earlier, later], [earlier, later], [later], []):
        found[:] = rows
        await job.run_once()
        times.append(outbox.times)
    assert times == [0, 1, 1, 2, 2, 2, 2]
