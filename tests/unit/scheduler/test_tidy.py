"""What lives is out of the collector's reach; what conversations leave behind is not for ever."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest

from scheduler.acting import Acting
from scheduler.loops.collect_garbage import CLOSED_MIN, CollectGarbage


class Knot:
    """Holds itself, as what a conversation leaves may."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def in_reach_again() -> Iterator[None]:
    yield
    gc.unfreeze()


async def test_what_lives_is_not_walked_and_what_was_left_is_freed_at_last() -> None:
    acting: Any = SimpleNamespace(ended=0, peers={})
    tidy = CollectGarbage(cast(Acting, acting))
    knot = Knot()
    left = ref(knot)
    assert not (await tidy.run_once()).walked
    assert all(one is not knot for one in gc.get_objects())
    del knot
    assert not (await tidy.run_once()).walked
    assert left() is not None
    acting.ended = CLOSED_MIN + 1
    assert (await tidy.run_once()).walked
    assert left() is None


async def test_a_fleet_that_nobody_leaves_is_walked_too() -> None:
    acting: Any = SimpleNamespace(ended=0, peers={})
    tidy = CollectGarbage(cast(Acting, acting))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.loops.collect_garbage.TURNS_MAX", 2)
        assert [(await tidy.run_once()).walked for _ in range(4)] == [False, False, True, False]
