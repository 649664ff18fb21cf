"""The memory that this process may take: what its cgroups and its config allow, and what it has.

Pages of files are the system's to drop, so that they count as free: a cgroup that has read a model
from disk looks full by its own figure and is not.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.scheduler.memory_ceiling import Use, refusal, tightest

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_LOOK_EVERY_S: Final = 0.2
_RETRY_AFTER_S: Final = 1.0


def uses(ceiling_bytes: int, root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> list[Use]:
    """Return what has a ceiling: this process, where one is given, and its cgroups (v2)."""
    found = _cgroups(root, own)
    if ceiling_bytes:
        found.append(Use("this engine", int(psutil.Process().memory_info().rss), ceiling_bytes))
    return found


class MemoryWatch:
    """Looks now and then, when asked, how near the ceilings are."""

    def __init__(
        self, look: Callable[[], Sequence[Use]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch what `look` sees."""
        self._look = look
        self._clock = clock
        self._seen: Sequence[Use] = ()
        self._look_at_s = clock()
        self._refused = 0

    def hold(self) -> None:
        """Raise ApiError where another request cannot be taken."""
        why = refusal(self._uses())
        if why:
            self._refused += 1
            raise ApiError(ErrorCode.OUT_OF_CAPACITY, why, retry_after_s=_RETRY_AFTER_S)

    def counts(self) -> dict[str, float]:
        """Return what is reported; a ceiling of 0 is none."""
        now = self._uses()
        use = tightest(now)
        return {
            "memory_used_bytes": use.used_bytes if use else 0,
            "memory_ceiling_bytes": use.ceiling_bytes if use else 0,
            "memory_full": bool(refusal(now)),
            "memory_refused_total": self._refused,
        }

    def _uses(self) -> Sequence[Use]:
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._seen = self._look()
            self._look_at_s = now_s + _LOOK_EVERY_S
        return self._seen


def _cgroups(root: Path, own: Path) -> list[Use]:
    """Return this process's cgroup and those around it, each that has a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / path
    found = []
    for each in (folder, *folder.parents):
        if each == root.parent:
            break
        use = _cgroup(each)
        if use is not None:
            found.append(use)
    return found


def _cgroup(folder: Path) -> Use | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if not limit.isdigit():
            return None
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        # The root has no limit, and a system without cgroups v2 has none at all.
        return None
    files = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return Use("its cgroup", max(used - files, 0), int(limit))
