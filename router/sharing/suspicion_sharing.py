"""Shares suspect requests between the processes of one router, and between all routers.

A client's next request may reach any router and any of its processes. Once a second each process
reports to the main process, which informs the other processes and, through the scheduler, the other
routers. All routers have the same digest key. The processes share a monotonic clock; messages to
other routers say how long ago an event was.
"""

from collections import deque
from typing import Final

import msgspec

from isochrone.wire.peers.suspicions import SUSPICION_ROWS_MAX, FleetLoss, FleetSuspicions
from router.decide.admission.suspicion import EngineLoss

OUTBOX_ROWS_MAX: Final = 1024
"""More news than this in one turn is not shared: each process then counts for itself."""


class SharedLoss(msgspec.Struct, frozen=True, array_like=True):
    """One EngineLoss."""

    fingerprint: bytes
    tenant_id: str
    replica_id: str
    sent_at_s: float
    lost_at_s: float
    sent_token: int = 0
    lost_token: int = 0


class SharedSuspicions(msgspec.Struct, frozen=True, tag="suspicions"):
    """The engines lost in one turn, and the fingerprints cleared in it."""

    losses: tuple[SharedLoss, ...] = ()
    cleared: tuple[bytes, ...] = ()


class FleetSuspicionOutbox:
    """Suspicions to be sent to the other routers. Times are monotonic seconds."""

    def __init__(self) -> None:
        """Start empty."""
        self._losses: deque[SharedLoss] = deque(maxlen=SUSPICION_ROWS_MAX)
        self._cleared: deque[bytes] = deque(maxlen=SUSPICION_ROWS_MAX)

    def add(self, shared: SharedSuspicions) -> None:
        """Add losses that a process of this router has seen; the oldest is dropped if it is too
        much."""
        self._losses.extend(shared.losses)
        self._cleared.extend(shared.cleared)

    def take(self) -> SharedSuspicions | None:
        """Return the suspicions to send and forget them; None if there are none."""
        if not self._losses and not self._cleared:
            return None
        shared = SharedSuspicions(tuple(self._losses), tuple(self._cleared))
        self._losses.clear()
        self._cleared.clear()
        return shared


def to_fleet(shared: SharedSuspicions, now_s: float) -> FleetSuspicions:
    """Return the message for other routers, to be sent now."""
    losses = (
        FleetLoss(
            row.fingerprint,
            row.tenant_id,
            row.replica_id,
            max(0.0, now_s - row.lost_at_s),
            max(0.0, row.lost_at_s - row.sent_at_s),
            row.sent_token,
            row.lost_token,
        )
        for row in shared.losses
    )
    return FleetSuspicions(losses=tuple(losses), cleared=shared.cleared)


def from_fleet(message: FleetSuspicions, now_s: float) -> SharedSuspicions:
    """Return the losses that another router has seen, with times of this machine."""
    losses = (
        SharedLoss(
            row.fingerprint,
            row.tenant_id,
            row.replica_id,
            now_s - row.lost_ago_s - row.ran_s,
            now_s - row.lost_ago_s,
            row.sent_token,
            row.lost_token,
        )
        for row in message.losses
    )
    return SharedSuspicions(tuple(losses), message.cleared)


class SuspicionOutbox:
    """Suspicions not shared yet."""

    def __init__(self) -> None:
        """Start empty, and take nothing until `is_open` is set."""
        self.is_open = False
        self._losses: list[SharedLoss] = []
        self._cleared: list[bytes] = []

    def add_loss(self, loss: EngineLoss) -> None:
        """Add a lost engine."""
        if self.is_open and len(self._losses) < OUTBOX_ROWS_MAX:
            row = SharedLoss(
                loss.fingerprint,
                loss.tenant_id,
                loss.replica_id,
                loss.sent_at_s,
                loss.lost_at_s,
                loss.sent_token,
                loss.lost_token,
            )
            self._losses.append(row)

    def add_cleared(self, fingerprint: bytes) -> None:
        """Add a request that an engine answered."""
        if self.is_open and len(self._cleared) < OUTBOX_ROWS_MAX:
            self._cleared.append(fingerprint)

    def take(self) -> SharedSuspicions | None:
        """Return the suspicions and empty the outbox; None if there are none."""
        if not self._losses and not self._cleared:
            return None
        message = SharedSuspicions(tuple(self._losses), tuple(self._cleared))
        self._losses.clear()
        self._cleared.clear()
        return message
