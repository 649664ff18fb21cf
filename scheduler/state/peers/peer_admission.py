"""Limits how many peers register at once when a whole fleet connects; the others wait their turn.

They wait on their open connections. To send a peer away costs almost as much as to register it,
and one that comes back too late leaves the scheduler idle. `scheduler/decide` decides how many
register; this module applies it.
"""

import asyncio

from isochrone.wire.peers.control import PeerRole
from scheduler import metrics
from scheduler.decide.membership import ConnectionAdmission, Places
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.peer_registry import PeerRegistry


class TurnTaken(Exception):
    """The same peer connected again, and the new connection has its turn."""


class PeerAdmission:
    """Registrations of this process, and appointments while no scheduler acts."""

    def __init__(self, *, per_s: float, lease: LeaseState, peers: PeerRegistry) -> None:
        """Admit `per_s` registrations a second, on the clock of `lease`."""
        self.fleet_size = 0
        """How many nodes and routers may connect, as the store counts them."""
        self._per_s = per_s
        self._lease = lease
        self._peers = peers
        self._registrations = ConnectionAdmission(per_s)
        self._appointments = Places(per_s)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """The turns of waiting peers, in order."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def redial_spread_s(self) -> float:
        """Return over how many seconds the fleet should spread its redials."""
        return max(self.fleet_size, len(self._peers)) / self._per_s

    @property
    def waiting(self) -> int:
        """Return how many peers wait for their turn."""
        return len(self._waiting)

    async def wait_turn(self, role: PeerRole, name: str) -> None:
        """Wait until a peer may register, after those that came before it.

        It counts as admitted until `release`. Raises TurnTaken.
        """
        key = _key(role, name)
        turn = asyncio.get_running_loop().create_future()
        previous = self._waiting.get(key)
        if previous is not None and not previous.done():
            previous.set_exception(TurnTaken())
        self._waiting[key] = turn  # at the place of the previous one
        self._admit_next()
        try:
            with metrics.PEERS_WAITING.track_inprogress():
                await turn
        except asyncio.CancelledError:
            if self._waiting.get(key) is turn:
                del self._waiting[key]
            elif not turn.cancelled() and turn.exception() is None:
                self.release(role, name)
            raise

    def release(self, role: PeerRole, name: str) -> None:
        """Let the next peer register: this one is served, or gone."""
        self._registrations.served(_key(role, name))
        self._admit_next()

    def appointment_s(self) -> float:
        """Return in how many seconds a peer should come back, once this standby may act."""
        return self._appointments.take(self._lease.free_at) - self._lease.clock()

    def reset(self) -> None:
        """Begin with no registrations: a new term begins."""
        self._registrations = ConnectionAdmission(self._per_s)
        self._appointments = Places(self._per_s)
        self._admit_next()

    def dismiss(self) -> None:
        """End all waits at once: this scheduler no longer acts."""
        waiting, self._waiting = self._waiting, {}
        for turn in waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _admit_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            now = self._lease.clock()
            if (wait_s := self._registrations.wait_s(now)) > 0:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(wait_s, self._admit_next)
                return
            key = next(iter(self._waiting))
            turn = self._waiting.pop(key)
            if not turn.done():  # it is cancelled if its peer just left
                self._registrations.admit(key, now)
                turn.set_result(None)


def _key(role: PeerRole, name: str) -> str:
    return f"{role.value} {name}"
