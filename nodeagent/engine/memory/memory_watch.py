"""The memory of this process: its limits (cgroups, configuration), its use, and its free part.

Page cache counts as free, because the kernel can drop it: a cgroup that has read a model from disk
looks full by its own figure, but is not.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil
import torch

from isochrone.service.machine_share import (
    CGROUPS,
    OWN_CGROUP,
    free_memory_bytes,
    memory_limit_of,
    memory_used_by,
    own_cgroups,
)
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.memory.memory_ceiling import MemoryUse, refusal_reason, tightest

_MEASURE_INTERVAL_S: Final = 0.2
_RETRY_AFTER_S: Final = 1.0


def memory_uses(
    ceiling_bytes: int, root: Path = CGROUPS, own: Path = OWN_CGROUP
) -> list[MemoryUse]:
    """Return the use of everything that has a limit: this process and its cgroups (v2).

    This process has one if `ceiling_bytes` is not 0.
    """
    found = (_cgroup_use(cgroup) for cgroup in own_cgroups(root, own))
    uses = [use for use in found if use is not None]
    if ceiling_bytes:
        resident_bytes = int(psutil.Process().memory_info().rss)
        uses.append(MemoryUse("this engine", resident_bytes, ceiling_bytes))
    return uses


def available_bytes(device: str) -> int:
    """Return the free memory of `device` in bytes; raises CheckpointError if torch lacks it.

    Host memory is limited by the cgroups of this process.
    """
    if device != "cpu":
        if not torch.cuda.is_available():
            raise CheckpointError(f"cannot use {device}: torch sees no CUDA device")
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


class MemoryWatch:
    """Refuses requests while memory is short; measures at most once per interval."""

    def __init__(
        self,
        measure: Callable[[], Sequence[MemoryUse]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._clock = clock
        self._measured: Sequence[MemoryUse] = ()
        self._measure_at_s = clock()
        self._refused = 0

    def check(self) -> None:
        """Raise ApiError if another request cannot be accepted."""
        reason = refusal_reason(self._uses())
        if reason:
            self._refused += 1
            raise ApiError(ErrorCode.OUT_OF_CAPACITY, reason, retry_after_s=_RETRY_AFTER_S)

    def counts(self) -> dict[str, float]:
        """Return the metrics by name; a ceiling of 0 means no limit."""
        uses = self._uses()
        use = tightest(uses)
        return {
            "memory_used_bytes": use.used_bytes if use else 0,
            "memory_ceiling_bytes": use.ceiling_bytes if use else 0,
            "memory_full": bool(refusal_reason(uses)),
            "memory_refused_total": self._refused,
        }

    def _uses(self) -> Sequence[MemoryUse]:
        now_s = self._clock()
        if now_s >= self._measure_at_s:
            self._measured = self._measure()
            self._measure_at_s = now_s + _MEASURE_INTERVAL_S
        return self._measured


def _cgroup_use(folder: Path) -> MemoryUse | None:
    limit, used = memory_limit_of(folder), memory_used_by(folder)
    return None if limit is None or used is None else MemoryUse("its cgroup", used, limit)
