"""Limits the rate of registrations when a whole fleet connects at once.

`scheduler/decide` decides the rate; this module applies it.
"""

from isochrone.wire.peers.control import PeerRole
from scheduler.decide.membership import ConnectionAdmission
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.peer_registry import PeerRegistry


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
        self._appointments = ConnectionAdmission(per_s)

    @property
    def redial_spread_s(self) -> float:
        """Return over how many seconds the fleet should spread its redials."""
        return max(self.fleet_size, len(self._peers)) / self._per_s

    def wait_s(self, role: PeerRole, name: str) -> float:
        """Return 0 if a peer may register now, else for how long it should wait."""
        return self._registrations.wait_s(f"{role.value} {name}", self._lease.clock())

    def release(self, role: PeerRole, name: str) -> None:
        """Let the next peer register: this one is served, or gone."""
        self._registrations.served(f"{role.value} {name}", self._lease.clock())

    def appointment_s(self) -> float:
        """Return in how many seconds a peer should come back, once this standby may act."""
        return self._appointments.take_place(self._lease.free_at) - self._lease.clock()

    def reset(self) -> None:
        """Begin with no registrations: peers that waited have their appointments."""
        self._registrations = ConnectionAdmission(self._per_s)
