"""The part of the machine that this process may use: cores and memory.

This part is often less than the machine has: a service can be pinned to some cores (CPUAffinity),
and its cgroup or a parent of that can have limits (CPUQuota, MemoryMax, those of a container). A
process for each core of the machine would then compete for the few that it has, and models planned
for all of its memory would be killed.
"""

import os
from collections.abc import Iterator
from math import ceil, inf
from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUP: Final = Path("/proc/self/cgroup")


def usable_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the cores that this process may use; a part of a core counts as one.

    `root` is the file system of cgroups (v2), and `own` the file that names the process's cgroup.
    """
    quota = min((_quota_of(cgroup) for cgroup in own_cgroups(root, own)), default=inf)
    return ceil(min(quota, len(os.sched_getaffinity(0))))


def usable_memory_bytes(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the machine's memory, or the least limit of this process's cgroups if that is less."""
    limits = (memory_limit_of(cgroup) for cgroup in own_cgroups(root, own))
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def own_cgroups(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Iterator[Path]:
    """Yield the folder of this process's cgroup (v2), then those of its parents."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / path
    for cgroup in (folder, *folder.parents):
        if cgroup == root.parent:
            return
        yield cgroup


def memory_limit_of(cgroup: Path) -> int | None:
    """Return the memory limit of a cgroup in bytes; None without one."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        # The root cgroup has no limit, and a system without cgroups v2 has no such file.
        return None
    return int(limit) if limit.isdigit() else None


def memory_used_by(cgroup: Path) -> int | None:
    """Return the memory that a cgroup uses, without page cache; None if it does not say."""
    try:
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    page_cache = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(used - page_cache, 0)


def free_memory_bytes() -> int:
    """Return the machine's free memory, or the least that a cgroup of this process has left."""
    left_bytes = [int(psutil.virtual_memory().available)]
    for cgroup in own_cgroups():
        limit, used = memory_limit_of(cgroup), memory_used_by(cgroup)
        if limit is not None and used is not None:
            left_bytes.append(limit - used)
    return min(left_bytes)


def _quota_of(cgroup: Path) -> float:
    """Return the cores that a cgroup may use; infinite without a quota."""
    try:
        allowed, period = (cgroup / "cpu.max").read_text().split()
    except OSError:
        return inf
    return int(allowed) / int(period) if allowed.isdigit() else inf
