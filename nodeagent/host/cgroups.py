"""A memory limit round an engine, where the system lets us set one (cgroup v2)."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

ROOT: Final = Path("/sys/fs/cgroup")


def confine(name: str, pid: int, memory_bytes: int, root: Path = ROOT) -> bool:
    """Put `pid` into a group of its own limited to `memory_bytes`; False where not permitted."""
    own = _own_group(root)
    if own is None or memory_bytes <= 0:
        return False
    group = own / f"isochrone-{name}"
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(str(memory_bytes))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        log.info("no cgroup for the engine", extra={"fields": {"reason": str(error)}})
        return False
    return True


def dissolve(name: str, root: Path = ROOT) -> None:
    """Remove an empty group."""
    own = _own_group(root)
    if own is not None:
        with suppress(OSError):
            (own / f"isochrone-{name}").rmdir()


def _own_group(root: Path) -> Path | None:
    """Return the delegated group that this process is in, on cgroup v2; else None."""
    if not (root / "cgroup.controllers").exists():
        return None
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return root / line[3:].lstrip("/")
    return None
