"""The CPU time that other processes took during a measurement.

A replica that shares its core is slower. If the share differs between the profile and the run, the
simulator is compared with another machine than the one that was profiled.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

OTHER_CPU_SHARE_MAX: Final = 0.05
"""If other processes take a larger share of the machine, a calibration says little."""

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class OtherCpuUse:
    """Measures since it was created, or since the last call."""

    def __init__(self) -> None:
        self._own_s: dict[int, float] = {}
        self._busy_s = self._all_s = 0.0
        self.share()

    def share(self) -> float:
        """Return the share of all cores' time that processes other than our own took."""
        busy_s, all_s = _machine()
        own_s = _descendants()
        # The time of processes that have ended is not counted as ours: they are few and short.
        ours = sum(spent - self._own_s.get(pid, 0.0) for pid, spent in own_s.items())
        passed = all_s - self._all_s
        others = busy_s - self._busy_s - ours
        self._own_s, self._busy_s, self._all_s = own_s, busy_s, all_s
        return max(0.0, others / passed) if passed else 0.0


def _machine() -> tuple[float, float]:
    """Return the busy seconds of all cores, steal included, and all seconds."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, line.split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy * _TICK_S, (busy + idle + iowait) * _TICK_S


def _descendants() -> dict[int, float]:
    """Return the CPU seconds of this process and its descendants, by pid."""
    parents, spent_s = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # A process name may contain anything; after its last bracket there are only numbers.
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            spent_s[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return {pid: spent_s[pid] for pid in own if pid in spent_s}
