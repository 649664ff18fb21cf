"""Full garbage collections of a router: what they walk, and that nothing is lost for good."""

import gc
import sys
from collections.abc import Iterator

import pytest

from isochrone.wire.ids import PopId
from router.fleet_state import FleetState
from router.loops.collect_garbage import (
    TURNS_PER_COUNT,
    CollectInTurns,
)
from tests.unit.router.test_follow_routes import a_table


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def freeze() -> Iterator[None]:
    """Put the objects of all imported tests back where no collection walks them."""
    yield
    gc.freeze()


@pytest.fixture
def frozen() -> Iterator[CollectInTurns]:
    # Python's own collections of the youngest objects would free some before the turn does.
    gc.disable()
    # As much as a large route table: Python's rules depend on how many objects there are.
    before = [[number] for number in range(400_000)]
    garbage = CollectInTurns(frozen_min=1)
    try:
        with garbage.in_turns():
            yield garbage
    finally:
        gc.enable()
        before.clear()


def cycles() -> int:
    return sum(type(thing) is Cycle for thing in gc.get_objects())


async def test_a_collection_walks_nothing_that_an_earlier_turn_has_seen(
    frozen: CollectInTurns,
) -> None:
    """The state of a table's replicas is walked once, not each time that Python thinks of it."""
    fleet = FleetState(PopId("ams"), lambda: 0.0, "boot")
    fleet.adopt(a_table("abcdefghijklmnopqrstuvwxyz", 1))
    assert any(thing is fleet for thing in gc.get_objects())
    await frozen.run_once()
    # What `gc.get_objects` lists is what the next collection walks.
    assert not any(thing is fleet for thing in gc.get_objects())
    assert len(gc.get_objects()) < 1_000


async def test_new_cycles_are_freed_in_each_turn_and_frozen_ones_with_a_walk(
    frozen: CollectInTurns,
) -> None:
    kept = Cycle()
    await frozen.run_once()
    del kept
    Cycle()
    counts = [await frozen.run_once() for _ in range(TURNS_PER_COUNT)]
    assert counts[0].collected >= 1 and not counts[0].walked
    walks = [turn for turn in counts if turn.walked]
    assert len(walks) == 1 and walks[0].collected >= 1
    gc.unfreeze()
    assert cycles() == 0


async def test_frozen_objects_are_counted_only_when_enough_may_have_been_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count goes through all of them; requests waited 25 ms for it each minute."""
    counts = 0
    blocks = 5_000_000

    def count() -> int:
        nonlocal counts
        counts += 1
        return 300

    monkeypatch.setattr(gc, "get_freeze_count", count)
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks)
    garbage = CollectInTurns(frozen_min=1_000)

    async def turns() -> int:
        nonlocal counts
        counts = 0
        for _ in range(3 * TURNS_PER_COUNT):
            assert not (await garbage.run_once()).walked
        return counts

    with garbage.in_turns():
        assert await turns() == 0
        blocks += 699
        assert await turns() == 0
        # What was freed meanwhile may have been anything.
        blocks -= 2_000
        assert await turns() == 0
        blocks += 700
        assert await turns() == 1, "counted once, and again only after as many more blocks"


def test_a_collection_comes_before_the_turn_when_many_objects_are_made(
    frozen: CollectInTurns,
) -> None:
    """A burst of objects is not left for one long collection, and is walked once."""
    kept = Cycle()
    youngest, middle, _ = gc.get_threshold()
    # So many new objects come before a collection of the middle generation.
    step = youngest * (middle + 1)
    gc.enable()
    before = gc.get_freeze_count()
    made = [Cycle() for _ in range(6 * step)]
    assert gc.get_freeze_count() > before + 3 * step, "some of them were collected and frozen"
    assert not any(thing is kept for thing in gc.get_objects())
    assert cycles() < 3 * step, "no collection will have many of them to walk"
    gc.collect()
    # Whoever runs a full collection, what it leaves is frozen.
    assert not cycles() and len(made) == 6 * step


def test_pythons_own_collections_come_back_at_the_end() -> None:
    before = gc.get_threshold()
    with CollectInTurns().in_turns():
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    gc.collect()
    assert gc.get_freeze_count() == 0
