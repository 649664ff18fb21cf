"""What devices this machine has: its GPUs by NVML, or the CPU where there is none."""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import psutil
from msgspec.structs import replace

from isochrone.wire.ids import DeviceId
from isochrone.wire.report import NodeDevice

log = logging.getLogger(__name__)

CPU: Final = DeviceId("cpu")
CPU_SHARE: Final = 0.8
GPU_SHARE: Final = 0.95


class DeviceReader:
    """Reads the devices. A GPU once seen and no more to be read is reported unhealthy, not gone."""

    def __init__(self, cpu_memory_bytes: int, open_nvml: Callable[[], Any] | None = None) -> None:
        """Let replicas use so much of a CPU's memory; 0 is most of it."""
        self._cpu_memory_bytes = cpu_memory_bytes
        self._nvml = (open_nvml or _open_nvml)()
        self._seen: dict[DeviceId, NodeDevice] = {}

    def read(self) -> Sequence[NodeDevice]:
        """Return every device as it is now. Blocks for some milliseconds."""
        if self._nvml is None:
            usable = self._cpu_memory_bytes or int(psutil.virtual_memory().total * CPU_SHARE)
            return (NodeDevice(device_id=CPU, device_class="cpu", memory_bytes=usable),)
        found: dict[DeviceId, NodeDevice] = {}
        reason = "NVML no longer sees it"
        try:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                device = self._gpu(index)
                found[device.device_id] = device
        except self._nvml.NVMLError as error:
            reason = f"NVML: {error}"
        for device_id, device in self._seen.items():
            if device_id not in found:
                found[device_id] = replace(device, healthy=False, reason=reason)
        self._seen = found
        return tuple(found.values())

    def _gpu(self, index: int) -> NodeDevice:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        name = self._nvml.nvmlDeviceGetName(handle)
        return NodeDevice(
            device_id=DeviceId(f"gpu{index}"),
            device_class=device_class(name, memory.total),
            memory_bytes=int(memory.total * GPU_SHARE),
        )


def device_class(name: str, memory_bytes: int) -> str:
    """Return the class of a GPU from its name: `NVIDIA H100 80GB HBM3` is `h100-80g`."""
    words = re.sub(r"(?i)nvidia|geforce|tesla|quadro|graphics|device", " ", name).split()
    model = next((w for w in words if any(c.isdigit() for c in w)), words[0] if words else "gpu")
    return f"{model.lower()}-{round(memory_bytes / 1e9)}g"


def _open_nvml() -> Any:
    """Return the NVML module where it has a GPU to show, else None."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount() > 0:
            return pynvml
    log.info("no GPU here: the CPU is the device")
    return None
