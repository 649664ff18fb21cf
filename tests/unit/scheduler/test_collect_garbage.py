"""The collector does not walk live objects, and frees the cycles that connections leave."""

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from scheduler.loops.collect_garbage import CLOSED_MIN, CollectGarbage
from scheduler.state.peers.peer_registry import PeerRegistry


class Cycle:
    """Refers to itself, as what a closed connection leaves behind may."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def freeze() -> Iterator[None]:
    """Put the objects of all imported tests back where no collection walks them."""
    yield
    gc.freeze()


async def test_live_objects_are_not_walked_and_old_cycles_are_freed_at_last() -> None:
    peers = PeerRegistry()
    job = CollectGarbage(peers)
    cycle = Cycle()
    reference = ref(cycle)
    assert not (await job.run_once()).walked
    assert all(item is not cycle for item in gc.get_objects())
    del cycle
    assert not (await job.run_once()).walked
    assert reference() is not None
    peers.closed_count = CLOSED_MIN + 1
    assert (await job.run_once()).walked
    assert reference() is None


async def test_the_heap_is_walked_now_and_then_though_no_connection_closes() -> None:
    job = CollectGarbage(PeerRegistry())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.loops.collect_garbage.TURNS_MAX", 2)
        assert [(await job.run_once()).walked for _ in range(4)] == [False, False, True, False]
