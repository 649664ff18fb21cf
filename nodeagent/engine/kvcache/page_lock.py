"""Page-locked host memory: a GPU copies from and to it directly.

CUDA copies other memory through a small buffer of its own, so that the CPU copies it once more.

Rule: memory that cannot be locked is used without. A warning says why.
"""

import logging
import resource
from collections.abc import Callable
from functools import cache
from mmap import mmap
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)


def _no_unlock() -> None:
    """Do nothing: the memory is not locked."""


def host_memory(size_bytes: int, device: str) -> np.ndarray:
    """Return memory with any content [bytes], page-locked if `device` is a GPU."""
    if device.startswith("cuda"):
        try:
            locked: np.ndarray = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            return locked
        except RuntimeError as error:
            _warn(str(error))
    return np.empty(size_bytes, np.uint8)


def lock_pages(memory: mmap, device: str) -> Callable[[], None]:
    """Lock memory that is shared with other processes, if `device` is a GPU; return what unlocks
    it, to be called before it is unmapped.

    Its mapping must be a shared one: the pages of a private one are copied when they are locked.
    """
    if not device.startswith("cuda"):
        return _no_unlock
    place = torch.frombuffer(memory, dtype=torch.uint8)
    address, size_bytes = place.data_ptr(), place.nbytes
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = cuda.cudaHostRegister(address, size_bytes, 0)
    if error != cuda.cudaError.success:
        _warn(cuda.cudaGetErrorString(error))
        return _no_unlock

    def unlock() -> None:
        with torch.cuda.device(device):
            cuda.cudaHostUnregister(address)

    return unlock


@cache
def _warn(reason: str) -> None:
    """Log once for each reason that memory could not be locked."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
    log.warning(
        "cannot lock host memory for copies of the GPU: %s; they take longer. The process may lock"
        " %s (memlock: `ulimit -l`, LimitMEMLOCK of a systemd unit)",
        reason,
        limit,
    )
