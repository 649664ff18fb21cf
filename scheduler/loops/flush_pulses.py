"""Stores the signs of life that have arrived since the last turn."""

from typing import NamedTuple

from scheduler import metrics
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.heartbeats import PulseBuffer
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.store.fleet.nodes import record_pulses, record_routers_seen
from scheduler.store.pool import UNAVAILABLE, Pool, transaction


class PulseCounts(NamedTuple):
    """How many nodes and routers one turn stored as alive."""

    pulses: int = 0
    routers: int = 0


class FlushPulses:
    """Uses the reserved connections: a busy pool must not make live nodes look dead."""

    def __init__(
        self, *, reserved: Pool, lease: LeaseState, peers: PeerRegistry, pulses: PulseBuffer
    ) -> None:
        self._reserved = reserved
        self._lease = lease
        self._peers = peers
        self._pulses = pulses

    async def run_once(self) -> PulseCounts:
        """Store a batch. A batch that fails is lost; newer pulses replace it."""
        if not self._lease.is_acting:
            return PulseCounts()
        pulses = self._pulses.take()
        routers = [(peer.name, peer.generation) for peer in self._peers.routers()]
        try:
            async with transaction(self._reserved) as connection:
                if pulses:
                    await record_pulses(connection, pulses)
                if routers:
                    await record_routers_seen(connection, routers)
        except UNAVAILABLE:
            self._peers.forget_stored_reports()
            raise
        metrics.PULSES.inc(len(pulses))
        return PulseCounts(len(pulses), len(routers))
