"""KV memory is taken from the system before it is used, without a change, and within limits."""

import resource
from pathlib import Path

import pytest
import torch

from nodeagent.engine.core import first_touch
from nodeagent.engine.core.first_touch import SPARE_BYTES, FirstTouch
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels.huge_pages import PAGE_BYTES, huge_page_bytes
from tests.unit.engine.tiny import llama

PLENTY_BYTES = 1 << 50


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes(memory: torch.Tensor) -> int:
    """Return how much of `memory` the system has given."""
    page = resource.getpagesize()
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(memory.data_ptr() // page * 8)
        entries = pagemap.read(memory.nbytes // page * 8)
    return page * sum(bool(entries[at + 7] & 0x80) for at in range(0, len(entries), 8))


def run(touch: FirstTouch) -> None:
    touch.start()
    touch._thread.join()


def test_all_memory_is_there_and_as_it_was() -> None:
    regions = [huge_page_bytes(3 * PAGE_BYTES), huge_page_bytes(PAGE_BYTES + 4096)]
    regions[0][5] = 7
    touch = FirstTouch(regions, lambda: PLENTY_BYTES)
    run(touch)
    assert touch.touched_bytes == sum(region.nbytes for region in regions)
    assert [resident_bytes(region) for region in regions] == [len(region) for region in regions]
    assert int(regions[0][5]) == 7
    assert int(regions[0].sum()) == 7
    before = faults()
    for region in regions:
        region.fill_(1)
    assert faults() - before < 10


def test_nothing_is_touched_where_memory_is_short_or_after_a_stop() -> None:
    region = huge_page_bytes(2 * PAGE_BYTES)
    short = FirstTouch([region], lambda: SPARE_BYTES - 1)
    run(short)
    stopped = FirstTouch([region], lambda: PLENTY_BYTES)
    stopped._stopping.set()
    run(stopped)
    stopped.stop()
    assert short.touched_bytes == 0
    assert stopped.touched_bytes == PAGE_BYTES
    assert resident_bytes(region) == PAGE_BYTES
    assert stopped._regions == ()


def test_a_system_that_cannot_do_it_touches_as_memory_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_touch, "_MADV_POPULATE_WRITE", 9999)
    touch = FirstTouch([huge_page_bytes(PAGE_BYTES)], lambda: PLENTY_BYTES)
    run(touch)
    assert touch.touched_bytes == 0


@pytest.mark.parametrize(("sleeps", "is_touched"), [(False, True), (True, False)])
def test_kv_that_a_sleep_gives_back_is_not_touched(sleeps: bool, is_touched: bool) -> None:
    runner = ModelRunner(llama(1), 16, "cpu", torch.float32)
    touch = first_touch.first_touch(runner, 0, sleeps=sleeps)
    run(touch)
    assert (touch.touched_bytes > 0) is is_touched
