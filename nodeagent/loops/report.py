"""Tells the scheduler everything this node is."""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from isochrone import __version__
from isochrone.service.control_link import ControlLink
from isochrone.wire.report import Pulse, ReplicaState, Report
from nodeagent import metrics
from nodeagent.config import NodeConfig
from nodeagent.host import tiers
from nodeagent.host.artifacts import Artifacts
from nodeagent.node import Node
from nodeagent.supervisor import Supervisor


class Reported(NamedTuple):
    """One turn's outcome."""

    replicas: int
    sent: bool


class Disk(NamedTuple):
    """What lies on this node's disk, what of it in the page cache, and what more it may take."""

    artifacts: tuple[str, ...] = ()
    in_host_memory: tuple[str, ...] = ()
    free_bytes: int = 0
    bytes_per_s: float = 0.0


class ReportDuty:
    """The whole truth, on change and every ten seconds."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        node: Node,
        supervisor: Supervisor,
        artifacts: Artifacts,
        link: ControlLink,
    ) -> None:
        self._config = config
        self._node = node
        self._supervisor = supervisor
        self._artifacts = artifacts
        self._disk = Disk()
        self._link = link
        self._seq = 0

    async def run_once(self) -> Reported:
        """Say everything; forget what was reported stopped."""
        metrics.CONNECTED.set(self._link.connected)
        if not self._link.connected:
            return Reported(len(self._supervisor.replicas), False)
        report = await self._report()
        sent = await self._link.send(report)
        if sent:
            stopped = [
                replica.spec.replica_id
                for replica in report.replicas
                if replica.state is ReplicaState.STOPPED
            ]
            self._supervisor.forget(stopped)
        return Reported(len(report.replicas), sent)

    async def _report(self) -> Report:
        self._seq += 1
        stored = self._node.progress()
        devices = await self._node.read_devices()
        needed = {prefetch.artifact.digest for prefetch in self._node.prefetches()}
        pinned = needed | set(self._supervisor.pinned())
        # An artifact that is dropped as it is looked at: what was seen before is told once more.
        with suppress(FileNotFoundError):
            self._disk = await asyncio.to_thread(self._look_at_disk, pinned)
        disk = self._disk
        return Report(
            node_id=self._node.node_id,
            boot_id=self._node.boot_id,
            seq=self._seq,
            generation=stored.generation,
            epoch=stored.epoch,
            address=self._config.address,
            devices=tuple(devices),
            replicas=tuple(r.report() for r in list(self._supervisor.replicas.values())),
            refusals=self._node.refusals,
            artifacts=disk.artifacts,
            in_host_memory=disk.in_host_memory,
            disk_free_bytes=disk.free_bytes,
            disk_bytes_per_s=disk.bytes_per_s,
            fetch_bytes_per_s=self._artifacts.link.seen_bytes_per_s,
            failure_domain=self._config.failure_domain,
            rank_ports=self._config.plaintext_rank_ports,
            version=__version__,
        )

    def _look_at_disk(self, pinned: Collection[str]) -> Disk:
        held = {digest: self._artifacts.files_of(digest) for digest in self._artifacts.held()}
        rate = self._disk.bytes_per_s
        if not rate:
            # Once in a life of this agent: it takes a moment of the disk.
            largest = max(
                (file for files in held.values() for file in files),
                key=lambda file: file.stat().st_size,
                default=None,
            )
            rate = tiers.disk_bytes_per_s(largest) if largest else 0.0
        return Disk(
            tuple(held),
            tuple(
                digest
                for digest, files in held.items()
                if tiers.is_in_host_memory(files, was=digest in self._disk.in_host_memory)
            ),
            self._artifacts.disk_free_bytes(pinned),
            rate,
        )


class PulseDuty:
    """A sign of life, every two seconds."""

    def __init__(self, node: Node, link: ControlLink) -> None:
        self._node = node
        self._link = link
        self._seq = 0

    async def run_once(self) -> bool:
        """Send it, or not: the next says the same and more. Say whether it was sent."""
        self._seq += 1
        pulse = Pulse(
            node_id=self._node.node_id,
            boot_id=self._node.boot_id,
            seq=self._seq,
            generation=self._node.progress().generation,
        )
        return await self._link.send(pulse)
