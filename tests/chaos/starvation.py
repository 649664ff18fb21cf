"""Takes away what a process lives of: CPU time, file descriptors, memory."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

PERIOD_S: Final = 0.1
"""As long as the kernel's period of CPU quotas."""

SPARE_DESCRIPTORS: Final = 8
CROWD: Final = 4 * SPARE_DESCRIPTORS
OOM_SCORE_MAX: Final = 1000
EATER: Final = "eaten = bytearray()\nwhile True: eaten += bytes(range(256)) * 4096\n"
LIMIT_BYTES: Final = 32 << 20


@asynccontextmanager
async def starved_of_cpu(pid: int, share: float = 0.1) -> AsyncIterator[None]:
    """Let a process run for only a share of each PERIOD_S, as a CPU quota would."""

    async def stop_and_go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - share))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S * share)

    running = asyncio.create_task(stop_and_go())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, ProcessLookupError):
            await running
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def without_descriptors(pid: int, port: int) -> AsyncIterator[psutil.Process]:
    """Leave a process no descriptor for the connections of a crowd to its port."""
    watched = psutil.Process(pid)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = watched.num_fds() + SPARE_DESCRIPTORS
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CROWD)]
    try:
        yield watched
    finally:
        for _, writer in crowd:
            writer.transport.abort()
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has used."""
    return float(sum(process.cpu_times()[:2]))


class MemoryGroup:
    """A memory cgroup, in which the kernel kills a process when its limit is reached."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self._folder = folder
        self._limit_file = limit_file

    def kill_for_memory(self, pid: int) -> None:
        """Have the kernel kill `pid`, because another process takes the memory of the group."""
        (self._folder / self._limit_file).write_text(str(LIMIT_BYTES))
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE_MAX))
        self._add(pid)
        eater = subprocess.Popen(
            [sys.executable, "-c", f"input()\n{EATER}"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._add(eater.pid)
        # What the victim holds was taken elsewhere: its death frees too little for the eater.
        eater.communicate(b"\n")

    def _add(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))


@contextmanager
def a_memory_group() -> Iterator[MemoryGroup]:
    """Make a memory cgroup (version 1 or 2); skip the test where that is not allowed."""
    root = Path("/sys/fs/cgroup")
    of_version_1 = (root / "memory").is_dir()
    parent = root / "memory" if of_version_1 else root
    folder = parent / f"isochrone-test-{os.getpid()}"
    try:
        if not of_version_1:
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make a memory cgroup: {error}")
    try:
        yield MemoryGroup(folder, "memory.limit_in_bytes" if of_version_1 else "memory.max")
    finally:
        _move_to(parent, folder)
        folder.rmdir()


def _move_to(parent: Path, folder: Path) -> None:
    """Move what is left in a group to its parent."""
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (parent / "cgroup.procs").write_text(pid)
