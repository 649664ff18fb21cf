"""Samples how long the first threads of some processes computed and waited for a processor.

The kernel counts both for each thread (`/proc/PID/schedstat`, Documentation/scheduler/sched-stats):
nanoseconds on a processor, and nanoseconds ready to run but not on one.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

SAMPLE_S: Final = 0.05


class ThreadTime(NamedTuple):
    """The times of a process's first thread since it began, in seconds."""

    computed_s: float
    waited_s: float


class ProcessorWaits:
    """The samples of some processes, by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._samples: list[tuple[float, dict[str, ThreadTime]]] = []

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            found = {}
            for name, pid in self._pids.items():
                # The process may have ended.
                with suppress(OSError):
                    found[name] = thread_time(pid)
            self._samples.append((time.perf_counter(), found))
            await asyncio.sleep(SAMPLE_S)

    def between(self, began_s: float, ended_s: float) -> dict[str, ThreadTime]:
        """Return what each process had between two times, to within two samples."""
        before = [found for at_s, found in self._samples if at_s <= began_s][-1:]
        after = [found for at_s, found in self._samples if at_s >= ended_s][:1]
        if not before or not after:
            return {}
        first, last = before[0], after[0]
        return {
            name: ThreadTime(*(new - old for new, old in zip(last[name], first[name], strict=True)))
            for name in self._pids
            if name in first and name in last
        }


def thread_time(pid: int) -> ThreadTime:
    """Return what the first thread of a process has had.

    Raises OSError if it is gone.
    """
    computed_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return ThreadTime(int(computed_ns) / 1e9, int(waited_ns) / 1e9)


def first_child(pid: int) -> int | None:
    """Return the child of a process that has computed most, or None if it has none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=thread_time, default=None)
