"""Ends the conversations of peers whose certificate was revoked, or has ended unrenewed.

What is revoked is told to the nodes, with their assignments: their doors refuse it too.
"""

from typing import NamedTuple

from isochrone.service.identity import CLOCK_SKEW
from isochrone.wire.admin import RevocationView
from isochrone.wire.control import Refused, RefusedCode
from scheduler.acting import Acting, now
from scheduler.connected import Connected
from scheduler.store.identities import revoked_since
from scheduler.store.pool import using

LOOK_BACK_S = 120.0
RETRY_AFTER_S = 30.0


class DisconnectCounts(NamedTuple):
    """One turn's counts."""

    peers: int
    nodes_told: int = 0


class DisconnectRevoked:
    """A certificate is checked when a conversation begins; this duty checks those that go on."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._read_at = acting.clock()
        self._told_at = 0.0

    async def run_once(self) -> DisconnectCounts:
        """Read what was revoked since the last turn that could read, and look who ran out."""
        acting = self._acting
        if not acting.is_acting:
            return DisconnectCounts(0)
        asked_at = acting.clock()
        since_s = asked_at - self._read_at + LOOK_BACK_S
        async with using(acting.pool) as connection:
            revocations = await revoked_since(connection, since_s)
        self._read_at = asked_at
        ending = [
            (peer, reason) for peer in acting.peers.values() if (reason := _why(peer, revocations))
        ]
        for peer, reason in ending:
            refused = Refused(code=RefusedCode.IDENTITY, reason=reason, retry_after_s=RETRY_AFTER_S)
            await peer.end(refused)
        return DisconnectCounts(len(ending), await self._tell(revocations))

    async def _tell(self, revocations: list[RevocationView]) -> int:
        """Tell every node, where something was revoked since they were told."""
        newest = max((revoked.at for revoked in revocations), default=0.0)
        if newest <= self._told_at:
            return 0
        told = await self._acting.tell_assignments([peer.name for peer in self._acting.agents()])
        self._told_at = newest
        return told


def _why(peer: Connected, revocations: list[RevocationView]) -> str:
    """Say why a conversation must end; "" where it may go on."""
    certificate = peer.certificate
    if certificate.expires_at + CLOCK_SKEW < now():
        return (
            f"the certificate ended at {certificate.expires_at} and was not renewed; join again, "
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
