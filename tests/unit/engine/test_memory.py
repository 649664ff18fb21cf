"""The memory limit: inside its margin requests are refused, until memory is free again."""

from pathlib import Path

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.memory.memory_ceiling import MemoryUse, refusal_reason
from nodeagent.engine.memory.memory_watch import MemoryWatch, memory_uses

MIB = 1024 * 1024
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("used", "ceiling", "full"),
    [
        (0, GIB, False),
        (GIB - GIB // 20 - 1, GIB, False),
        (GIB - GIB // 20, GIB, True),
        (2 * GIB, GIB, True),
        # On a large machine the margin is a fixed size.
        (1000 * GIB - 513 * MIB, 1000 * GIB, False),
        (1000 * GIB - 512 * MIB, 1000 * GIB, True),
    ],
)
def test_the_margin_is_kept_free(used: int, ceiling: int, full: bool) -> None:
    reason = refusal_reason([MemoryUse("this engine", used, ceiling)])
    assert bool(reason) == full
    if full:
        assert f"uses {used} bytes" in reason
        assert f"limit is {ceiling}" in reason


def test_the_tightest_limit_counts_and_without_one_nothing_is_refused() -> None:
    ample, tight = MemoryUse("its cgroup", GIB, 8 * GIB), MemoryUse("this engine", GIB, GIB)
    assert "this engine" in refusal_reason([ample, tight])
    assert refusal_reason([ample]) == ""
    assert refusal_reason([]) == ""


def test_requests_are_refused_until_use_falls_below_the_margin() -> None:
    now_s, used = [0.0], [GIB]
    watch = MemoryWatch(lambda: [MemoryUse("this engine", used[0], GIB)], lambda: now_s[0])
    with pytest.raises(ApiError) as refused:
        watch.check()
    assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
    assert refused.value.retry_after_s
    counts = {"memory_used_bytes": GIB, "memory_ceiling_bytes": GIB}
    assert watch.counts() == counts | {"memory_full": True, "memory_refused_total": 1}
    used[0] = GIB // 2
    now_s[0] = 1.0
    watch.check()
    counts["memory_used_bytes"] = GIB // 2
    assert watch.counts() == counts | {"memory_full": False, "memory_refused_total": 1}


def cgroup(folder: Path, limit: str, current: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {files}\ninactive_file {files}\n")


def test_every_parent_cgroup_counts_without_its_page_cache(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("9:name=systemd:/\n0::/system.slice/engine.service\n")
    assert memory_uses(0, root, own) == []
    cgroup(root / "system.slice", str(8 * GIB), 3 * GIB, 0)
    cgroup(root / "system.slice" / "engine.service", str(4 * GIB), 3 * GIB, GIB)
    cgroup(root, "max", 9 * GIB, 0)
    limits = [(use.used_bytes, use.ceiling_bytes) for use in memory_uses(0, root, own)]
    assert limits == [(GIB, 4 * GIB), (3 * GIB, 8 * GIB)]


def test_a_configured_ceiling_counts_the_resident_memory(tmp_path: Path) -> None:
    (use,) = memory_uses(GIB, tmp_path, tmp_path / "none")
    assert use.ceiling_bytes == GIB
    assert use.used_bytes > MIB
