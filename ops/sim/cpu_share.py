"""Whether a measurement had the machine for itself: what CPU all others took meanwhile.

A replica that must share its core is slower by as much. Where that differs between the profile and
the run that is compared with it, the simulator is asked about another machine than was measured.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

OTHER_CPU_SHARE_MAX: Final = 0.05
"""With others taking a larger share of the machine, a calibration says little."""

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class OtherCpuUse:
    """Counts from when it was made, or from when it was last asked."""

    def __init__(self) -> None:
        self._own_s: dict[int, float] = {}
        self._busy_s = self._all_s = 0.0
        self.others_share()

    def others_share(self) -> float:
        """Return which share of all cores' time went to processes that are not of our making."""
        busy_s, all_s = _machine()
        own_s = _descendants()
        # Who has ended meanwhile is counted as idle before: they are few and short.
        ours = sum(spent - self._own_s.get(pid, 0.0) for pid, spent in own_s.items())
        passed = all_s - self._all_s
        others = busy_s - self._busy_s - ours
        self._own_s, self._busy_s, self._all_s = own_s, busy_s, all_s
        return max(0.0, others / passed) if passed else 0.0


def _machine() -> tuple[float, float]:
    """Return the seconds that all cores were busy, steal included, and all there were."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, line.split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy * _TICK_S, (busy + idle + iowait) * _TICK_S


def _descendants() -> dict[int, float]:
    """Return what this process and all below it have spent, by pid."""
    parents, spent_s = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # A name may hold anything; what follows its last bracket is numbers.
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            spent_s[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return {pid: spent_s[pid] for pid in own if pid in spent_s}
