"""Watches the memory of a node without GPUs (decide/replicas/memory_shortage.py)."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isochrone.wire.ids import DeviceId
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.decide.replicas.memory_shortage import ReplicaMemory, is_short, replica_to_end
from nodeagent.drivers.driver import DeviceMemory
from nodeagent.host.devices import CPU

MIB = 1 << 20


class RunningReplica(NamedTuple):
    """A replica and the process id of its engine."""

    spec: ReplicaSpec
    pid: int


@dataclass(eq=False)
class MemoryGuard:
    """Says which replica must end for the others.

    `memory` returns the memory of devices, and `used_by` what a process group takes.
    """

    memory: Callable[[Sequence[DeviceId]], DeviceMemory | None]
    used_by: Callable[[int, Sequence[DeviceId]], int]

    async def problem(self, replica: ReplicaSpec, running: Collection[RunningReplica]) -> str:
        """Return why a replica must end so that the others keep their memory, or ""."""
        if CPU not in replica.device_ids:
            return ""
        memory = self.memory((CPU,))
        if memory is None or not is_short(memory.free_bytes, memory.total_bytes):
            return ""
        found = await asyncio.to_thread(self._to_end, running)
        if found is None or found.replica_id != replica.replica_id:
            return ""
        return (
            f"the node has {memory.free_bytes // MIB} MiB of memory left, and this engine takes"
            f" {found.used_bytes // MIB} MiB of {found.planned_bytes // MIB} planned: raise the"
            " extra_bytes of its model, or lower the --kv-bytes of its deployment"
        )

    def _to_end(self, running: Collection[RunningReplica]) -> ReplicaMemory | None:
        measured = [
            ReplicaMemory(spec.replica_id, spec.memory_bytes, self.used_by(pid, (CPU,)))
            for spec, pid in running
            if CPU in spec.device_ids and spec.memory_bytes
        ]
        return replica_to_end(measured)
