"""Writes the signs of life that came in since the last turn."""

from typing import NamedTuple

from scheduler import metrics
from scheduler.acting import Acting
from scheduler.store.nodes import record_pulses, record_routers_seen
from scheduler.store.pool import UNAVAILABLE, transaction


class PulseCounts(NamedTuple):
    """One turn's counts."""

    pulses: int
    routers: int


class FlushPulses:
    """On the reserved connections: a busy pool must never make a live fleet look dead."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> PulseCounts:
        """Write, or lose: the next pulse says the same and more."""
        if not self._acting.is_acting:
            return PulseCounts(0, 0)
        pulses = self._acting.take_pulses()
        routers = [(peer.name, peer.generation) for peer in self._acting.routers()]
        try:
            async with transaction(self._acting.reserved) as connection:
                if pulses:
                    await record_pulses(connection, pulses)
                if routers:
                    await record_routers_seen(connection, routers)
        except UNAVAILABLE:
            self._acting.forget_written()
            raise
        metrics.PULSES.inc(len(pulses))
        return PulseCounts(len(pulses), len(routers))
