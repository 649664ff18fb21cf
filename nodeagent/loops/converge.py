"""CORRIDOR: what is assigned, what runs, what to do about the difference."""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from isochrone.wire.report import Refusal
from nodeagent.decide.reconcile import reconcile
from nodeagent.drivers import DRIVERS
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor

REFUSED_S: Final = 60.0


class ConvergeCounts(NamedTuple):
    """One turn's counts."""

    began: int = 0
    ended: int = 0
    refused: int = 0


class ConvergeJob:
    """Makes what runs become what is assigned."""

    def __init__(
        self,
        node: NodeState,
        supervisor: Supervisor,
        clock: Callable[[], float],
        rank_ports: tuple[int, int] | None = None,
    ) -> None:
        self._node = node
        self._supervisor = supervisor
        self._clock = clock
        self._rank_ports = rank_ports
        self._refused: dict[ReplicaId, tuple[float, Refusal]] = {}

    async def run_once(self) -> ConvergeCounts:
        """Reconcile and take the steps; a turn without a difference takes none."""
        await self._node.take_unkept()
        assignment = self._node.assignment
        if assignment is None:
            return ConvergeCounts()
        devices = await self._node.read_devices()
        steps = reconcile(
            assignment,
            self._supervisor.states(),
            [device.device_id for device in devices if device.healthy],
            await asyncio.to_thread(_lacks),
            self._rank_ports,
        )
        for tombstone in steps.endings:
            self._supervisor.end(tombstone)
        for spec in steps.beginnings:
            self._supervisor.begin(spec)
        self._note(steps.refusals)
        return ConvergeCounts(len(steps.beginnings), len(steps.endings), len(steps.refusals))

    def _note(self, refusals: tuple[Refusal, ...]) -> None:
        """Tell what is refused, and for REFUSED_S what was: its like would come at once."""
        now = self._clock()
        self._refused |= {one.replica_id: (now, one) for one in refusals}
        running = self._supervisor.replicas
        self._refused = {
            replica_id: (at, one)
            for replica_id, (at, one) in self._refused.items()
            if now - at < REFUSED_S and replica_id not in running
        }
        told = tuple(one for _, one in self._refused.values())
        if told != self._node.refusals:
            self._node.refusals = told
            self._node.nudge_report()


def _lacks() -> dict[str, str]:
    """Say of each driver what it lacks here; each turn, for it may be installed meanwhile."""
    return {name: driver.lacks() for name, driver in DRIVERS.items()}
