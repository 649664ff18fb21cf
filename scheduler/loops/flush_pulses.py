"""Stores the signs of life that have arrived since the last turn."""

from dataclasses import dataclass
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


@dataclass(eq=False, kw_only=True)
class FlushPulses:
    """Uses the reserved connections: a busy pool must not make live nodes look dead."""

    reserved: Pool
    lease: LeaseState
    peers: PeerRegistry
    pulses: PulseBuffer

    async def run_once(self) -> PulseCounts:
        """Store a batch. A batch that fails is lost; newer pulses replace it."""
        if not self.lease.is_acting:
            return PulseCounts()
        pulses = self.pulses.take()
        routers = [(peer.name, peer.generation) for peer in self.peers.routers()]
        try:
            async with transaction(self.reserved) as connection:
                if pulses:
                    await record_pulses(connection, pulses)
                if routers:
                    await record_routers_seen(connection, routers)
        except UNAVAILABLE:
            self.peers.forget_stored_reports()
            raise
        metrics.PULSES.inc(len(pulses))
        return PulseCounts(len(pulses), len(routers))
