"""A fleet that dials at once comes in at the pace that was set, each at the time it was told."""

import heapq
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.decide.membership.connection_admission import (
    AT_ONCE_MAX,
    BURST_S,
    WITHIN_S,
    ConnectionAdmission,
)


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 400),
    per_s=st.sampled_from([10.0, 50.0, 200.0]),
    seed=st.integers(0, 2**16),
)
def test_all_come_in_once_and_never_faster_than_the_pace(
    count: int, per_s: float, seed: int
) -> None:
    chance = random.Random(seed)
    line = ConnectionAdmission(per_s)
    dials = sorted((chance.uniform(0.0, 0.1), f"n{index}") for index in range(count))
    admitted: list[float] = []
    tries = 0
    while dials:
        now, name = dials.pop(0)
        tries += 1
        wait_s = line.wait_s(name, now)
        if wait_s == 0:
            admitted.append(now)
            line.served(name, now)
        else:
            dials.append((now + wait_s + chance.uniform(0.0, 0.3), name))
            dials.sort()
    assert len(admitted) == count
    assert tries <= 2 * count, "each is told its time once"
    for index, at in enumerate(admitted):
        later = sum(1 for other in admitted[index:] if other <= at + 1.0)
        assert later <= per_s * (1.0 + BURST_S + 1.0) + 2
    assert admitted[-1] <= count / per_s + 1.0, "and nobody waits longer than the line is"


def test_who_comes_too_early_keeps_its_place() -> None:
    line = ConnectionAdmission(1.0)
    assert line.wait_s("a", 0.0) == 0.0
    line.served("a", 0.0)
    waits = {name: line.wait_s(name, 0.0) for name in "bcd"}
    assert waits == {"b": 1.0, "c": 2.0, "d": 3.0}
    assert line.wait_s("d", 1.0) == 2.0
    assert line.wait_s("d", 3.0) == 0.0
    assert line.wait_s("e", 3.0) == 1.0


def test_a_line_outside_begins_when_somebody_may_act() -> None:
    line = ConnectionAdmission(10.0)
    assert [round(line.place(5.0), 3) for _ in range(3)] == [5.0, 5.1, 5.2]


def test_those_who_never_return_do_not_hold_the_line_for_ever() -> None:
    line = ConnectionAdmission(100.0)
    for index in range(50_000):
        line.wait_s(f"ghost-{index}", 0.0)
    assert len(line._places) <= 20_000


def test_only_so_many_are_within_and_those_who_vanish_leave_it() -> None:
    line = ConnectionAdmission(1000.0)
    for index in range(AT_ONCE_MAX):
        assert line.wait_s(f"n{index}", 0.0) == 0.0
    assert line.wait_s("next", 0.2) >= 0.9
    line.served("n0", 0.3)
    assert line.wait_s("other", 0.3) > 0.0, "who came before has its place before"
    assert line.wait_s("next", 1.2) == 0.0
    assert line.wait_s("last", 1.2) > 0.0
    assert line.wait_s("later", WITHIN_S + 3.0) == 0.0, "nobody within was ever served"


@settings(deadline=None, max_examples=20)
@given(served_per_s=st.sampled_from([20.0, 50.0, 100.0]), seed=st.integers(0, 2**16))
def test_a_line_that_is_served_slowly_slows_down_rather_than_turn_many_away(
    served_per_s: float, seed: int
) -> None:
    chance = random.Random(seed)
    line = ConnectionAdmission(250.0)
    count, tries, free_at = 600, 0, 0.0
    dials = [(chance.uniform(0.0, 0.5), index, "dial") for index in range(count)]
    heapq.heapify(dials)
    done = 0
    while dials:
        now, index, what = heapq.heappop(dials)
        if what == "served":
            line.served(f"n{index}", now)
            done += 1
            continue
        tries += 1
        wait_s = line.wait_s(f"n{index}", now)
        if wait_s == 0:
            free_at = max(free_at, now) + 1 / served_per_s
            heapq.heappush(dials, (free_at, index, "served"))
        else:
            heapq.heappush(dials, (now + wait_s + chance.uniform(0.0, 0.2), index, "dial"))
    assert done == count
    assert tries <= 4 * count
    assert now <= 1.3 * count / served_per_s + 5.0, "and the door is hardly ever idle"
