"""Sends the node's full report and its pulse to the scheduler."""

import asyncio
import logging
from collections.abc import Callable, Collection
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


class ReportJob:
    """Sends the full report on every change and every ten seconds."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        node: NodeState,
        supervisor: Supervisor,
        artifacts: ArtifactStore,
        link: ControlLink,
    ) -> None:
        self._config = config
        self._node = node
        self._supervisor = supervisor
        self._artifacts = artifacts
        self._disk = DiskState()
        self._disk_problem = ""
        self._link = link
        self._seq = 0

    async def run_once(self) -> ReportCounts:
        """Send a report, then forget the replicas that it reported as stopped."""
        metrics.CONNECTED.set(self._link.connected)
        if not self._link.connected:
            return ReportCounts(len(self._supervisor.replicas), False)
        report = await self._report()
        sent = await self._link.send(report)
        if sent:
            stopped = [
                replica.spec.replica_id
                for replica in report.replicas
                if replica.state is ReplicaState.STOPPED
            ]
            self._supervisor.forget(stopped)
        return ReportCounts(len(report.replicas), sent)

    async def _report(self) -> Report:
        self._seq += 1
        progress = self._node.progress()
        devices = await self._node.read_devices()
        needed = {prefetch.artifact.digest for prefetch in self._node.prefetches()}
        pinned = needed | set(self._supervisor.pinned())
        disk = await self._read_disk(pinned)
        return Report(
            node_id=self._node.node_id,
            boot_id=self._node.boot_id,
            seq=self._seq,
            generation=progress.generation,
            epoch=progress.epoch,
            address=self._config.address,
            devices=tuple(devices),
            replicas=tuple(r.report() for r in list(self._supervisor.replicas.values())),
            refusals=self._node.refusals,
            artifacts=disk.artifacts,
            in_host_memory=disk.in_host_memory,
            disk_free_bytes=disk.free_bytes,
            disk_bytes_per_s=disk.bytes_per_s,
            fetch_bytes_per_s=self._artifacts.link.measured_bytes_per_s,
            failure_domain=self._config.failure_domain,
            rank_ports=self._config.plaintext_rank_ports,
            version=__version__,
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
            digest: self._artifacts.files_of(digest) for digest in self._artifacts.digests()
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
            self._artifacts.disk_free_bytes(pinned),
            rate,
        )


class PulseJob:
    """Sends a pulse, the node's sign of life, every two seconds."""

    def __init__(self, node: NodeState, link: ControlLink, unix_clock: Callable[[], float]) -> None:
        self._node = node
        self._link = link
        self._unix_clock = unix_clock
        self._seq = 0

    async def run_once(self) -> bool:
        """Send one pulse; return whether it was sent. A lost pulse is not repeated."""
        self._seq += 1
        pulse = Pulse(
            node_id=self._node.node_id,
            boot_id=self._node.boot_id,
            seq=self._seq,
            generation=self._node.progress().generation,
            assignment_refusal=self._node.assignment_refusal,
            sent_at=self._unix_clock(),
        )
        return await self._link.send(pulse)
