"""Disconnects peers whose certificate was revoked, or expired without being renewed.

Nodes learn of revocations with their assignments, and refuse these certificates too.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from isochrone.service.clock import utc_now
from isochrone.service.trust.identity import CLOCK_SKEW
from isochrone.wire.admin import RevocationView
from isochrone.wire.peers.control import PeerRole, RefusedCode, RegistrationRefused
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.peer_connection import PeerConnection
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.store.fleet.identities import revoked_since
from scheduler.store.pool import Pool, using

LOOK_BACK_S: Final = 120.0
"""How far the window of each read overlaps the last: revocations are stamped before they commit."""
RETRY_AFTER_S: Final = 30.0

SentRevocation = tuple[PeerRole, str, str, float]
"""The role, name, serial and time of a revocation that nodes were sent."""


class DisconnectCounts(NamedTuple):
    """How many peers one turn disconnected, and how many nodes it sent new revocations."""

    peers: int = 0
    nodes_sent: int = 0


class DisconnectRevoked:
    """Registration checks a certificate once; this job checks those of open connections."""

    def __init__(
        self, *, pool: Pool, lease: LeaseState, peers: PeerRegistry, assignments: AssignmentOutbox
    ) -> None:
        self._pool = pool
        self._lease = lease
        self._peers = peers
        self._assignments = assignments
        self._read_at = lease.clock()
        self._sent: frozenset[SentRevocation] = frozenset()

    async def run_once(self) -> DisconnectCounts:
        """Read what was revoked since the last successful turn, and disconnect those peers."""
        if not self._lease.is_acting:
            return DisconnectCounts()
        reading_at = self._lease.clock()
        since_s = reading_at - self._read_at + LOOK_BACK_S
        async with using(self._pool) as connection:
            revocations = await revoked_since(connection, since_s)
        self._read_at = reading_at
        now = utc_now()
        invalid = [
            (peer, reason)
            for peer in self._peers
            if (reason := _why_invalid(peer, revocations, now))
        ]
        # At once: a peer that reads nothing takes two seconds, and nodes learn of it afterwards.
        async with asyncio.TaskGroup() as tasks:
            for peer, reason in invalid:
                refused = RegistrationRefused(
                    code=RefusedCode.IDENTITY, reason=reason, retry_after_s=RETRY_AFTER_S
                )
                tasks.create_task(peer.refuse(refused))
        return DisconnectCounts(len(invalid), await self._send_to_nodes(revocations))

    async def _send_to_nodes(self, revocations: Sequence[RevocationView]) -> int:
        # The newest time does not suffice: a row with an earlier time may be committed later, and a
        # clock may be set back.
        found = frozenset((row.role, row.name, row.serial, row.at) for row in revocations)
        if found <= self._sent:
            return 0
        sent = await self._assignments.send_to([peer.name for peer in self._peers.agents()])
        self._sent = found
        return sent


def _why_invalid(peer: PeerConnection, revocations: Sequence[RevocationView], now: datetime) -> str:
    """Return why the peer's certificate is no longer valid; empty if it is."""
    certificate = peer.certificate
    if certificate.expires_at + CLOCK_SKEW < now:
        return (
            f"the certificate expired at {certificate.expires_at} and was not renewed; join again, "
            "if the clocks are right"
        )
    for revoked in revocations:
        if (revoked.role, revoked.name) != (peer.role, peer.name):
            continue
        if revoked.serial == certificate.serial or (
            not revoked.serial and revoked.at > certificate.issued_at.timestamp()
        ):
            return f"the certificate {certificate.serial} is revoked; join again"
    return ""
