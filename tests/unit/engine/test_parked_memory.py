"""Memory that is parked in a file comes back as it was; without a copy nothing is dropped."""

import errno
import os
from pathlib import Path

import pytest
import torch

from nodeagent.engine.architecture.errors import MemoryShortage
from nodeagent.engine.core import parked_model
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.parked_model import ParkedModel
from nodeagent.engine.kernels.huge_pages import PAGE_BYTES, HugePageArena, huge_page_bytes
from nodeagent.engine.memory.parked_memory import ParkedMemory
from tests.unit.engine.tiny import llama


def filled(arena: HugePageArena, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    taken = [arena.take(size) for size in sizes]
    for number, memory in enumerate(taken):
        memory.copy_(torch.arange(len(memory)) % 251 + number)
    return taken


def a_runner() -> ModelRunner:
    return ModelRunner(llama(1), 16, "cpu", torch.float32)


def test_memory_is_zero_while_parked_and_then_as_it_was(tmp_path: Path) -> None:
    arena = HugePageArena()
    # The last does not fit into the first mapping.
    taken = filled(arena, (100, 3 * PAGE_BYTES + 77, 33 * PAGE_BYTES))
    before = [memory.clone() for memory in taken]
    assert len(arena.regions()) == 2
    copy = ParkedMemory(tmp_path, arena.regions())
    for _ in range(2):
        copy.drop()
        assert not any(bool(memory.any()) for memory in taken)
        copy.restore()
        assert all(torch.equal(now, was) for now, was in zip(taken, before, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_lives_as_long_as_what_was_taken_from_it() -> None:
    arena = HugePageArena()
    taken = arena.take(33 * PAGE_BYTES)
    arena.take(1)
    assert len(arena.regions()) == 2
    del taken
    assert len(arena.regions()) == 1


def test_only_the_huge_pages_in_use_are_parked() -> None:
    arena = HugePageArena()
    taken = [arena.take(100)]
    assert [len(region) for region in arena.regions()] == [PAGE_BYTES]
    taken += [arena.take(size) for size in (3 * PAGE_BYTES + 77, 33 * PAGE_BYTES + 1)]
    assert [len(region) for region in arena.regions()] == [4 * PAGE_BYTES, 34 * PAGE_BYTES]


def test_a_parked_model_drops_its_kv_and_is_the_same_one_after(tmp_path: Path) -> None:
    arena, runner = HugePageArena(), a_runner()
    (weights,) = filled(arena, (1000,))
    before = weights.clone()
    for pages in runner.kv_pages():
        pages.fill_(1.0)
    parked = ParkedModel(arena.regions, tmp_path)
    assert parked.restore() is None
    assert parked.prepare()
    assert parked.restore() is None
    assert torch.equal(weights, before)
    assert parked.park(runner)
    assert not weights.any()
    assert not any(bool(pages.any()) for pages in runner.kv_pages())
    assert parked.restore() is runner
    assert torch.equal(weights, before)
    assert parked.restore() is None


def huge_page_kib(memory: torch.Tensor) -> int:
    """Return how much of the mapping in which `memory` begins is on huge pages."""
    is_in = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        first, dash, last = name.partition("-")
        if dash and not name.endswith(":"):
            is_in = int(first, 16) <= memory.data_ptr() < int(last, 16)
        elif is_in and name == "AnonHugePages:":
            return int(rest.split()[0])
    raise AssertionError("the memory is not mapped")


def test_kv_is_on_small_pages_after_a_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt touches a little of each layer's, and a huge page is zeroed when first touched."""
    arena, runner = HugePageArena(), a_runner()
    filled(arena, (1000,))
    kv = huge_page_bytes(4 * PAGE_BYTES)
    kv[0] = 1
    monkeypatch.setattr(runner, "kv_pages", lambda: [kv])
    parked = ParkedModel(arena.regions, tmp_path)
    assert parked.park(runner)
    assert parked.restore() is runner
    kv[0] = 1
    assert huge_page_kib(kv) == 0


def test_a_model_is_left_alone_where_no_copy_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, runner = HugePageArena(), a_runner()
    (weights,) = filled(arena, (1000,))
    assert not ParkedModel(lambda: [], tmp_path).park(runner)
    assert not ParkedModel(arena.regions, tmp_path / "missing").park(runner)
    monkeypatch.setattr(parked_model, "FREE_COPIES_MIN", 1 << 40)
    assert not ParkedModel(arena.regions, tmp_path).park(runner)
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not ParkedModel(arena.regions, tmp_path).park(runner)
    assert weights.any()


def test_a_model_stays_parked_while_memory_for_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, runner = HugePageArena(), a_runner()
    filled(arena, (1000,))
    parked = ParkedModel(arena.regions, tmp_path)
    assert parked.park(runner)
    with monkeypatch.context() as patched:
        patched.setattr(parked_model, "available_bytes", lambda _: 1000)
        with pytest.raises(MemoryShortage, match="1000 are available"):
            parked.restore()
    assert parked.restore() is runner


def test_a_model_whose_copy_cannot_be_read_has_to_be_loaded_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, runner = HugePageArena(), a_runner()
    filled(arena, (1000,))
    parked = ParkedModel(arena.regions, tmp_path)
    assert parked.park(runner)

    def unreadable(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", unreadable)
        assert parked.restore() is None
    # Its memory is not the model's any more.
    assert parked.restore() is None
    assert not parked.park(runner)
