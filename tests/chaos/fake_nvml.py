"""In place of pynvml: the GPUs that the file named in FAKE_NVML lists; a lost one raises NVMLError.

A copy of this file, named `pynvml.py`, is put first on a node agent's path.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MEMORY_BYTES = 80 << 30


class NVMLError(Exception):
    """The error of every NVML call."""


def nvmlInit() -> None:
    """Do nothing."""


def nvmlDeviceGetCount() -> int:
    return len(_is_lost())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if _is_lost()[index]:
        raise NVMLError("GPU is lost")
    return index


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    return SimpleNamespace(total=MEMORY_BYTES, free=MEMORY_BYTES, used=0)


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA H100 80GB HBM3"


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:
    return []


def _is_lost() -> list[bool]:
    found: list[bool] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return found
