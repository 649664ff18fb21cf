"""Give each engine of a benchmark a fixed share of a core, as if it had a device of its own.

Engines that share cores lend their time to each other: while one has no request, the others are
faster. So replicas that are used unevenly lose nothing, which no fleet of real devices would show.
A cgroup for each engine ends that. It needs root.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

PERIOD_US: Final = 10_000
"""An engine that has used its share stands still until the next period: about a token's time."""

WEIGHT_MOST: Final = {"cpu.shares": 262_144, "cpu.weight": 10_000}
"""In cgroups of version 1 and 2: other work of the machine takes little from an engine's share."""


@contextmanager
def device_shares(node_pids: Iterable[int], share: float) -> Iterator[None]:
    """Limit the engines that these nodes have started to `share` of a core each."""
    root = Path("/sys/fs/cgroup")
    parent = root / "cpu" if (root / "cpu").is_dir() else root
    folders = []
    try:
        for number, pid in enumerate(_engines(node_pids)):
            folder = parent / f"isochrone-bench-{os.getpid()}-{number}"
            _make_group(folder, share)
            folders.append(folder)
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    except OSError as error:
        raise SystemExit(f"cannot give engines a share of a core each: {error}") from None
    finally:
        for folder in folders:
            _remove_group(folder)


def _engines(node_pids: Iterable[int]) -> list[int]:
    """Return the processes of the nodes' engines."""
    children = [child for pid in node_pids for child in psutil.Process(pid).children()]
    engines = [child.pid for child in children if "nodeagent.engine" in child.cmdline()]
    if not engines:
        raise SystemExit("cannot give engines a share of a core each: no engine found")
    return engines


def _make_group(folder: Path, share: float) -> None:
    quota_us = round(share * PERIOD_US)
    if folder.parent.name == "cpu":
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        name = "cpu.shares"
    else:
        (folder.parent / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
        (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        name = "cpu.weight"
    (folder / name).write_text(str(WEIGHT_MOST[name]))


def _remove_group(folder: Path) -> None:
    for pid in (folder / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()
