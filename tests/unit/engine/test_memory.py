"""The memory ceiling: from its margin on nothing new is taken, and again once memory is back."""

from pathlib import Path

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.memory import MemoryWatch, uses
from nodeagent.engine.scheduler.memory_ceiling import Use, refusal

MIB = 1024 * 1024
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("used", "ceiling", "full"),
    [
        (0, GIB, False),
        (GIB - GIB // 20 - 1, GIB, False),
        (GIB - GIB // 20, GIB, True),
        (2 * GIB, GIB, True),
        # On a large machine the margin is no share any more.
        (1000 * GIB - 513 * MIB, 1000 * GIB, False),
        (1000 * GIB - 512 * MIB, 1000 * GIB, True),
    ],
)
def test_the_margin_is_kept_free(used: int, ceiling: int, full: bool) -> None:
    said = refusal([Use("this engine", used, ceiling)])
    assert bool(said) == full
    if full:
        assert f"uses {used} bytes" in said
        assert f"limit is {ceiling}" in said


def test_the_tightest_ceiling_counts_and_without_one_nothing_is_refused() -> None:
    roomy, tight = Use("its cgroup", GIB, 8 * GIB), Use("this engine", GIB, GIB)
    assert "this engine" in refusal([roomy, tight])
    assert refusal([roomy]) == ""
    assert refusal([]) == ""


def test_refused_until_it_is_below_again() -> None:
    now_s, used = [0.0], [GIB]
    watch = MemoryWatch(lambda: [Use("this engine", used[0], GIB)], lambda: now_s[0])
    with pytest.raises(ApiError) as refused:
        watch.hold()
    assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
    assert refused.value.retry_after_s
    told = {"memory_used_bytes": GIB, "memory_ceiling_bytes": GIB}
    assert watch.counts() == told | {"memory_full": True, "memory_refused_total": 1}
    used[0] = GIB // 2
    now_s[0] = 1.0
    watch.hold()
    told["memory_used_bytes"] = GIB // 2
    assert watch.counts() == told | {"memory_full": False, "memory_refused_total": 1}


def cgroup(folder: Path, limit: str, current: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {files}\ninactive_file {files}\n")


def test_every_cgroup_around_the_process_counts_without_pages_of_files(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("9:name=systemd:/\n0::/system.slice/engine.service\n")
    assert uses(0, root, own) == []
    cgroup(root / "system.slice", str(8 * GIB), 3 * GIB, 0)
    cgroup(root / "system.slice" / "engine.service", str(4 * GIB), 3 * GIB, GIB)
    cgroup(root, "max", 9 * GIB, 0)
    seen = [(use.used_bytes, use.ceiling_bytes) for use in uses(0, root, own)]
    assert seen == [(GIB, 4 * GIB), (3 * GIB, 8 * GIB)]


def test_a_given_ceiling_counts_what_the_process_has(tmp_path: Path) -> None:
    (use,) = uses(GIB, tmp_path, tmp_path / "none")
    assert use.ceiling_bytes == GIB
    assert use.used_bytes > MIB
