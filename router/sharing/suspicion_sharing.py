"""Shares suspect requests between the processes of one router, and between all routers.

A client's next request may reach any router and any of its processes. Once a second each process
reports to the main process, which informs the other processes and, through the scheduler, the other
routers. All routers have the same digest key. The processes share a monotonic clock; messages to
other routers say how long ago an event was.
"""

from collections import deque

import msgspec

from isochrone.wire.peers.suspicions import (
    SUSPICION_ROWS_MAX,
    EngineLoss,
    FleetLoss,
    FleetSuspicions,
)


class SharedSuspicions(msgspec.Struct, frozen=True, tag="suspicions"):
    """The engines lost in one turn, and the fingerprints cleared in it."""

    losses: tuple[EngineLoss, ...] = ()
    cleared: tuple[bytes, ...] = ()


class SuspicionOutbox:
    """Suspicions not shared yet. When full, the oldest are dropped."""

    def __init__(self) -> None:
        self._losses: deque[EngineLoss] = deque(maxlen=SUSPICION_ROWS_MAX)
        self._cleared: deque[bytes] = deque(maxlen=SUSPICION_ROWS_MAX)

    def add(self, shared: SharedSuspicions) -> None:
        """Add what a process of this router has seen."""
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
        EngineLoss(
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
