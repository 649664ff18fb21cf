"""What the processes of one router tell each other of suspect requests, once a second.

A client's next request may reach any of the processes. All have the same digest key and, as they
are on one machine, the same monotonic clock.
"""

from typing import Final

import msgspec

from router.decide.suspicion import EngineLoss

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
