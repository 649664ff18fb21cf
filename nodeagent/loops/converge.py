"""Main path of an assignment: compares it with what runs, then starts and stops replicas."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from isochrone.wire.peers.report import Refusal, ReplicaState
from nodeagent.decide.replicas.reconcile import LackingParts, reconcile
from nodeagent.drivers import missing_by_driver
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.driver import missing_package
from nodeagent.drivers.embedded import STORE_PACKAGE
from nodeagent.host.store_master import missing_master
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor

REFUSAL_REPORT_S: Final = 60.0
"""How long a refusal is reported after the assignment dropped it, so that the scheduler does not
place the replica here again at once."""

WITHOUT_ENGINE: Final = (ReplicaState.STOPPED, ReplicaState.FAILED)
"""The states of replicas that take no memory and will take none."""


class ConvergeCounts(NamedTuple):
    """The counts of one turn."""

    started: int = 0
    ended: int = 0
    refused: int = 0


class _TimedRefusal(NamedTuple):
    """A refusal and when it was last made."""

    at_s: float
    refusal: Refusal


@dataclass(eq=False)
class ConvergeJob:
    """Makes the running replicas match the assignment.

    `commands` are the operator's own servers, by name.
    `has_store_ports` says whether this node may take part in a store of KV.
    """

    node: NodeState
    supervisor: Supervisor
    clock: Callable[[], float]
    rank_ports: tuple[int, int] | None
    commands: Mapping[str, ConfiguredCommand]
    has_store_ports: bool = field(kw_only=True)
    _refusals: dict[ReplicaId, _TimedRefusal] = field(default_factory=dict, init=False)

    async def run_once(self) -> ConvergeCounts:
        """Reconcile once and apply the steps."""
        await self.node.retry_unsaved()
        lacking = await asyncio.to_thread(self._lacking_parts)
        self.node.note_missing(lacking.by_driver)
        assignment = self.node.assignment
        if assignment is None:
            return ConvergeCounts()
        devices = await self.node.read_devices()
        steps = reconcile(
            assignment,
            self.supervisor.states(),
            {device.device_id: device.memory_bytes for device in devices if device.healthy},
            lacking,
            self.rank_ports,
            [
                replica.spec
                for replica in self.supervisor.replicas.values()
                if replica.state not in WITHOUT_ENGINE
            ],
        )
        for tombstone in steps.stops:
            self.supervisor.end(tombstone)
        for spec in steps.starts:
            self.supervisor.start(spec)
        self._update_refusals(steps.refusals)
        return ConvergeCounts(len(steps.starts), len(steps.stops), len(steps.refusals))

    def _lacking_parts(self) -> LackingParts:
        """Return what engines lack on this node; they may be installed at any time. Blocks."""
        ports = "" if self.has_store_ports else "plaintext_kv_store_ports is not set on this node"
        return LackingParts(
            by_driver=missing_by_driver(self.commands),
            by_command={name: command.missing() for name, command in self.commands.items()},
            store=ports or missing_master(),
            store_client={"embedded": missing_package(STORE_PACKAGE)},
        )

    def _update_refusals(self, refusals: tuple[Refusal, ...]) -> None:
        """Report these refusals, and those of the last REFUSAL_REPORT_S."""
        now = self.clock()
        self._refusals |= {r.replica_id: _TimedRefusal(now, r) for r in refusals}
        running = self.supervisor.replicas
        self._refusals = {
            replica_id: timed
            for replica_id, timed in self._refusals.items()
            if now - timed.at_s < REFUSAL_REPORT_S and replica_id not in running
        }
        reported = tuple(timed.refusal for timed in self._refusals.values())
        if reported != self.node.refusals:
            self.node.refusals = reported
            self.node.nudge_report()
