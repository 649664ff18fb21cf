"""How far back a prefix cache reaches, as its events tell it."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.decide.cache_reach import CacheReach


def test_a_cache_that_evicted_nothing_reaches_back_to_its_beginning() -> None:
    reach = CacheReach(10.0)
    reach.store(["a", "b"], 20.0)
    assert reach.since_s == 10.0


def test_an_eviction_says_that_what_is_as_old_is_gone() -> None:
    reach = CacheReach(10.0)
    reach.store(["a"], 20.0)
    reach.store(["b"], 30.0)
    reach.store(["a"], 40.0)
    reach.remove(["b"])
    assert reach.since_s == 30.0
    # An older one that is evicted later had been used since.
    reach.remove(["a"])
    assert (reach.since_s, len(reach)) == (30.0, 0)


def test_of_a_cache_that_was_there_before_nothing_is_known_until_it_evicts_something_known() -> (
    None
):
    reach = CacheReach(None)
    reach.store(["a"], 20.0)
    reach.remove(["stored before"])
    assert reach.since_s is None
    reach.remove(["a"])
    assert reach.since_s == 20.0


def test_a_cache_that_was_emptied_begins_again() -> None:
    reach = CacheReach(10.0)
    reach.store(["a"], 20.0)
    reach.clear(50.0)
    reach.remove(["a"])
    assert (reach.since_s, len(reach)) == (50.0, 0)


def test_lost_events_leave_a_bounded_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.decide.cache_reach.BLOCKS_MAX", 100)
    reach = CacheReach(0.0)
    for number in range(1000):
        reach.store([number], float(number))
    assert len(reach) == 100
    reach.remove([950])
    assert reach.since_s == 950.0


@given(st.lists(st.integers(0, 15), max_size=200), st.integers(1, 8))
def test_it_says_no_less_than_what_the_cache_still_has(uses: list[int], blocks_max: int) -> None:
    """Everything used since then is cached, as long as prompts are single blocks."""
    cache: OrderedDict[int, float] = OrderedDict()
    reach, evicted_used_s = CacheReach(0.0), 0.0
    for now, block in enumerate(uses, 1):
        if block not in cache:
            reach.store([block], float(now))
        cache[block] = float(now)
        cache.move_to_end(block)
        while len(cache) > blocks_max:
            oldest, evicted_used_s = cache.popitem(last=False)
            reach.remove([oldest])
        assert reach.since_s is not None
        assert 0.0 <= reach.since_s <= evicted_used_s
        if len(set(uses[:now])) == now:
            # Each was used once: it is exact.
            assert reach.since_s == evicted_used_s
