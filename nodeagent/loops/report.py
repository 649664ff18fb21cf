"""Sends the node's full report and its pulse to the scheduler."""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from isochrone import __version__
from isochrone.service.network.control_link import ControlLink
from isochrone.wire.peers.report import Pulse, ReplicaState, Report
from nodeagent import metrics
from nodeagent.config import NodeConfig
from nodeagent.host.artifacts import tiers
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor

log = logging.getLogger(__name__)


class ReportCounts(NamedTuple):
    """The counts of one turn."""

    replicas: int
    sent: bool


class DiskState(NamedTuple):
    """The artifacts on disk, those in the page cache, and the disk's free space and speed."""

    artifacts: tuple[str, ...] = ()
    in_host_memory: tuple[str, ...] = ()
    free_bytes: int = 0
    bytes_per_s: float = 0.0


@dataclass(eq=False, kw_only=True)
class ReportJob:
    """Sends the full report on every change and every ten seconds."""

    config: NodeConfig
    node: NodeState
    supervisor: Supervisor
    artifacts: ArtifactStore
    link: ControlLink
    _disk: DiskState = field(default_factory=DiskState, init=False)
    _disk_problem: str = field(default="", init=False)
    _seq: int = field(default=0, init=False)

    async def run_once(self) -> ReportCounts:
        """Send a report, then forget the replicas that it reported as stopped."""
        metrics.CONNECTED.set(self.link.connected)
        if not self.link.connected:
            return ReportCounts(len(self.supervisor.replicas), False)
        report = await self._report()
        sent = await self.link.send(report)
        if sent:
            stopped = [
                replica.spec.replica_id
                for replica in report.replicas
                if replica.state is ReplicaState.STOPPED
            ]
            self.supervisor.forget(stopped)
        return ReportCounts(len(report.replicas), sent)

    async def _report(self) -> Report:
        self._seq += 1
        progress = self.node.progress()
        devices = await self.node.read_devices()
        needed = {prefetch.artifact.digest for prefetch in self.node.prefetches()}
        pinned = needed | set(self.supervisor.pinned())
        disk = await self._read_disk(pinned)
        return Report(
            node_id=self.node.node_id,
            boot_id=self.node.boot_id,
            seq=self._seq,
            generation=progress.generation,
            epoch=progress.epoch,
            address=self.config.address,
            devices=tuple(devices),
            replicas=tuple(r.report() for r in list(self.supervisor.replicas.values())),
            refusals=self.node.refusals,
            artifacts=disk.artifacts,
            in_host_memory=disk.in_host_memory,
            disk_free_bytes=disk.free_bytes,
            disk_bytes_per_s=disk.bytes_per_s,
            fetch_bytes_per_s=self.artifacts.link.measured_bytes_per_s,
            failure_domain=self.config.failure_domain,
            rank_ports=self.config.plaintext_rank_ports,
            version=__version__,
            lacking_engines=self.node.lacking_engines,
        )

    async def _read_disk(self, pinned: Collection[str]) -> DiskState:
        """Return the disk's state; the last known one if it cannot be read."""
        problem = ""
        try:
            self._disk = await asyncio.to_thread(self._examine_disk, pinned)
        except FileNotFoundError:
            pass  # an artifact was deleted meanwhile
        except OSError as error:
            # The rest of the report does not depend on the disk.
            problem = str(error)
        if problem and problem != self._disk_problem:
            log.warning("cannot examine the disk", extra={"fields": {"reason": problem}})
        self._disk_problem = problem
        return self._disk

    def _examine_disk(self, pinned: Collection[str]) -> DiskState:
        files_by_digest = {
            digest: self.artifacts.files_of(digest) for digest in self.artifacts.digests()
        }
        rate = self._disk.bytes_per_s
        if not rate:
            # Measured once per run of the agent, because it loads the disk.
            largest = max(
                (file for files in files_by_digest.values() for file in files),
                key=lambda file: file.stat().st_size,
                default=None,
            )
            rate = tiers.disk_bytes_per_s(largest) if largest else 0.0
        return DiskState(
            tuple(files_by_digest),
            tuple(
                digest
                for digest, files in files_by_digest.items()
                if tiers.is_in_host_memory(files, was=digest in self._disk.in_host_memory)
            ),
            self.artifacts.disk_free_bytes(pinned),
            rate,
        )


@dataclass(eq=False)
class PulseJob:
    """Sends a pulse, the node's sign of life, every two seconds."""

    node: NodeState
    link: ControlLink
    unix_clock: Callable[[], float]
    _seq: int = field(default=0, init=False)

    async def run_once(self) -> bool:
        """Send one pulse; return whether it was sent. A lost pulse is not repeated."""
        self._seq += 1
        pulse = Pulse(
            node_id=self.node.node_id,
            boot_id=self.node.boot_id,
            seq=self._seq,
            generation=self.node.progress().generation,
            assignment_refusal=self.node.assignment_refusal,
            sent_at=self.unix_clock(),
        )
        return await self.link.send(pulse)
