"""Reads the devices of this machine: its GPUs through NVML, or the CPU if it has none."""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
from msgspec.structs import replace

from isochrone.service.machine_share import free_memory_bytes, usable_memory_bytes
from isochrone.wire.ids import DeviceId
from isochrone.wire.peers.report import NodeDevice
from nodeagent.drivers.driver import DeviceMemory
from nodeagent.host.processes import group_members

log = logging.getLogger(__name__)

CPU: Final = DeviceId("cpu")
CPU_MEMORY_SHARE: Final = 0.8
GPU_MEMORY_SHARE: Final = 0.95
"""Shares of the physical memory that replicas may use."""


class DeviceReader:
    """Reads the devices. A GPU that disappears is reported as unhealthy, not as removed."""

    def __init__(self, cpu_memory_bytes: int, open_nvml: Callable[[], Any] | None = None) -> None:
        """Limit replicas on a CPU to `cpu_memory_bytes`.

        0 is CPU_MEMORY_SHARE of the memory that the agent may use.
        """
        self._cpu_memory_bytes = cpu_memory_bytes
        self._nvml = (open_nvml or _open_nvml)()
        self._seen: dict[DeviceId, NodeDevice] = {}

    def read(self) -> Sequence[NodeDevice]:
        """Return all current devices. Blocks for some milliseconds."""
        if self._nvml is None:
            usable = self._cpu_memory_bytes or int(usable_memory_bytes() * CPU_MEMORY_SHARE)
            return (NodeDevice(device_id=CPU, device_class="cpu", memory_bytes=usable),)
        found: dict[DeviceId, NodeDevice] = {}
        reasons: dict[DeviceId, str] = {}
        reason = "NVML no longer lists this GPU"
        try:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                device_id = _gpu_id(index)
                try:
                    found[device_id] = self._gpu(index)
                except self._nvml.NVMLError as error:
                    # One that fell off the bus; NVML goes on answering for the others.
                    reasons[device_id] = f"NVML failed: {error}"
        except self._nvml.NVMLError as error:
            reason = f"NVML failed: {error}"
        for device_id, device in self._seen.items():
            if device_id not in found:
                why = reasons.get(device_id, reason)
                found[device_id] = replace(device, healthy=False, reason=why)
        self._seen = found
        return tuple(found.values())

    def memory(self, device_ids: Sequence[DeviceId]) -> DeviceMemory | None:
        """Return the memory of the smallest of these devices; None if it is unknown. Blocks."""
        if self._nvml is None or CPU in device_ids:
            try:
                memory = psutil.virtual_memory()
            except OSError as error:  # no free descriptor
                log.warning("cannot read the memory", extra={"fields": {"reason": str(error)}})
                return None
            return DeviceMemory(total_bytes=memory.total, free_bytes=memory.available)
        try:
            indices = [int(device_id.removeprefix("gpu")) for device_id in device_ids]
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
            memories = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        except (ValueError, OSError, self._nvml.NVMLError) as error:
            log.warning("cannot read the memory of a GPU", extra={"fields": {"reason": str(error)}})
            return None
        if not memories:
            return None
        return DeviceMemory(
            total_bytes=min(int(memory.total) for memory in memories),
            free_bytes=min(int(memory.free) for memory in memories),
        )

    def usable_memory(self, device_ids: Sequence[DeviceId]) -> DeviceMemory | None:
        """Return `memory`, on a CPU within the limits of the agent's cgroups. Blocks.

        Engines run in the agent's cgroup. At its limit the kernel would end some process of it.
        """
        memory = self.memory(device_ids)
        if memory is None or CPU not in device_ids:
            return memory
        try:
            return DeviceMemory(total_bytes=usable_memory_bytes(), free_bytes=free_memory_bytes())
        except OSError:  # no free descriptor
            return memory

    def used_by(self, leader: int, device_ids: Sequence[DeviceId]) -> int:
        """Return the most that a process group takes of one of these devices. Blocks.

        On a CPU it is the group's share of resident memory; 0 if it cannot be read.
        """
        try:
            members = group_members(leader)
        except OSError as error:  # no free descriptor
            fields = {"leader": leader, "reason": str(error)}
            log.warning("cannot read who uses memory", extra={"fields": fields})
            return 0
        if self._nvml is None or CPU in device_ids:
            return sum(_proportional_bytes(pid) for pid in members)
        most = 0
        try:
            for device_id in device_ids:
                index = int(device_id.removeprefix("gpu"))
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                used = sum(
                    int(process.usedGpuMemory or 0) for process in running if process.pid in members
                )
                most = max(most, used)
        except (ValueError, OSError, self._nvml.NVMLError) as error:
            log.warning("cannot read who uses a GPU", extra={"fields": {"reason": str(error)}})
            return 0
        return most

    def _gpu(self, index: int) -> NodeDevice:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        name = self._nvml.nvmlDeviceGetName(handle)
        return NodeDevice(
            device_id=_gpu_id(index),
            device_class=device_class(name, memory.total),
            memory_bytes=int(memory.total * GPU_MEMORY_SHARE),
        )


def _gpu_id(index: int) -> DeviceId:
    return DeviceId(f"gpu{index}")


def _proportional_bytes(pid: int) -> int:
    """Return a process's resident memory, with pages that others share divided among them."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def device_class(name: str, memory_bytes: int) -> str:
    """Return the device class for a GPU's name and memory, such as `h100-86g`."""
    words = re.sub(r"(?i)nvidia|geforce|tesla|quadro|graphics|device", " ", name).split()
    model = next((w for w in words if any(c.isdigit() for c in w)), words[0] if words else "gpu")
    return f"{model.lower()}-{round(memory_bytes / 1e9)}g"


def _open_nvml() -> Any:
    """Return the initialised NVML module, or None if it finds no GPU."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount() > 0:
            return pynvml
    log.info("no GPU found: the CPU is the only device")
    return None
