"""Whether a peer with higher counters than the store is believed, as after a restored backup."""

from collections.abc import Callable
from typing import Final

from isochrone.wire.ids import Epoch, Generation
from isochrone.wire.peers.control import RefusedCode, Register
from scheduler.api.control.peer_frames import RETRY_REFUSED_S, PeerRefused
from scheduler.decide.membership import PeerLimit
from scheduler.store.events import record_event
from scheduler.store.pool import Connection

LEAP_MAX: Final = 2**40
"""The largest lead of a peer's generation or epoch over the store's: more than a restored backup
can have lost, and far less than would exhaust the 63 bits of these counters."""

RAISES_MAX: Final = 10
RAISE_EVERY_S: Final = 360.0
"""How often one peer may raise the store's counters: some times at once, then ten times an hour.
Each time a new term begins, in which nothing is placed until nodes have reported; after a restored
backup a peer does it once."""


class CounterRaises:
    """Counts how often each peer raises the store's counters."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._limit = PeerLimit(RAISES_MAX, RAISE_EVERY_S)

    async def note(
        self, connection: Connection, register: Register, newest: Generation, epoch: Epoch
    ) -> None:
        """Record that a peer is ahead of `newest` and `epoch`. Raises PeerRefused if it lies."""
        role, name = register.role.value, register.name
        claimed = f"generation {register.generation} and epoch {register.epoch}"
        has = f"the store is at {newest} and {epoch}"
        if register.generation - newest > LEAP_MAX or register.epoch - epoch > LEAP_MAX:
            reason = f"cannot believe {claimed}: {has}"
            raise PeerRefused(RefusedCode.MALFORMED, reason, RETRY_REFUSED_S)
        if not self._limit.take(f"{role} {name}", self._clock()):
            raise PeerRefused(
                RefusedCode.MALFORMED,
                f"cannot believe {claimed}: {name} has raised the store's counters too often; if no"
                " backup was restored, revoke it",
                RETRY_REFUSED_S,
            )
        await record_event(
            connection,
            actor=f"{role}:{name}",
            kind=f"{role}.raised_counters",
            subject=name,
            reason=f"to {claimed}: {has}, as after a restored backup",
        )
