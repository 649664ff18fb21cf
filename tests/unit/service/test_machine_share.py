"""The cores and the memory of a process end at its pinning and at the limits of its cgroups."""

import os
from pathlib import Path

import psutil
import pytest

from isochrone.service.machine_share import usable_cores, usable_memory_bytes

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path) -> tuple[Path, Path]:
    """A file system of cgroups with a service in a slice, and the file that names the service."""
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n0::/system.slice/router.service\n")
    (tmp_path / "cgroup/system.slice/router.service").mkdir(parents=True)
    return tmp_path / "cgroup", own


def limit(cgroup: Path, *, cpu: str = "max 100000", memory: str = "max") -> None:
    (cgroup / "cpu.max").write_text(f"{cpu}\n")
    (cgroup / "memory.max").write_text(f"{memory}\n")


def test_without_limits_a_process_may_use_what_it_is_pinned_to(
    cgroups: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5})
    limit(cgroups[0] / "system.slice")
    assert usable_cores(*cgroups) == 3
    assert usable_memory_bytes(*cgroups) == psutil.virtual_memory().total


def test_the_least_limit_of_all_parents_counts(
    cgroups: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root, _ = cgroups
    limit(root / "system.slice", cpu="400000 100000", memory=str(GIB))
    limit(root / "system.slice/router.service", cpu="800000 100000", memory=str(8 * GIB))
    assert usable_cores(*cgroups) == 4
    assert usable_memory_bytes(*cgroups) == GIB


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("150000 100000", 2)])
def test_a_part_of_a_core_counts_as_one(
    cgroups: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    limit(cgroups[0], cpu=quota)
    assert usable_cores(*cgroups) == cores


def test_a_system_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    absent = (tmp_path, tmp_path / "none")
    assert usable_cores(*absent) == len(os.sched_getaffinity(0))
    assert usable_memory_bytes(*absent) == psutil.virtual_memory().total
