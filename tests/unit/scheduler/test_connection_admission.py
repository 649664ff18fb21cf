"""A fleet that connects at once is admitted at the configured rate, each peer at its time."""

import heapq
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.decide.membership.connection_admission import (
    BURST_S,
    UNSERVED_MAX,
    UNSERVED_TIMEOUT_S,
    ConnectionAdmission,
)


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 400),
    per_s=st.sampled_from([10.0, 50.0, 200.0]),
    seed=st.integers(0, 2**16),
)
def test_every_peer_is_admitted_once_and_not_faster_than_the_rate(
    count: int, per_s: float, seed: int
) -> None:
    rng = random.Random(seed)
    admission = ConnectionAdmission(per_s)
    attempts = sorted((rng.uniform(0.0, 0.1), f"n{index}") for index in range(count))
    admitted: list[float] = []
    tries = 0
    while attempts:
        now, name = attempts.pop(0)
        tries += 1
        wait_s = admission.wait_s(name, now)
        if wait_s == 0:
            admitted.append(now)
            admission.served(name, now)
        else:
            attempts.append((now + wait_s + rng.uniform(0.0, 0.3), name))
            attempts.sort()
    assert len(admitted) == count
    assert tries <= 2 * count, "each peer is told its time once"
    for index, at in enumerate(admitted):
        later = sum(1 for other in admitted[index:] if other <= at + 1.0)
        assert later <= per_s * (1.0 + BURST_S + 1.0) + 2
    assert admitted[-1] <= count / per_s + 1.0, "no peer waits longer than the queue"


def test_a_peer_that_returns_early_keeps_its_place() -> None:
    admission = ConnectionAdmission(1.0)
    assert admission.wait_s("a", 0.0) == 0.0
    admission.served("a", 0.0)
    waits = {name: admission.wait_s(name, 0.0) for name in "bcd"}
    assert waits == {"b": 1.0, "c": 2.0, "d": 3.0}
    assert admission.wait_s("d", 1.0) == 2.0
    assert admission.wait_s("d", 3.0) == 0.0
    assert admission.wait_s("e", 3.0) == 1.0


def test_places_can_begin_at_a_later_time() -> None:
    admission = ConnectionAdmission(10.0)
    assert [round(admission.take_place(5.0), 3) for _ in range(3)] == [5.0, 5.1, 5.2]


def test_peers_that_never_return_lose_their_places() -> None:
    admission = ConnectionAdmission(100.0)
    for index in range(50_000):
        admission.wait_s(f"ghost-{index}", 0.0)
    assert len(admission._places) <= 20_000


def test_admitted_peers_are_limited_and_time_out() -> None:
    admission = ConnectionAdmission(1000.0)
    for index in range(UNSERVED_MAX):
        assert admission.wait_s(f"n{index}", 0.0) == 0.0
    assert admission.wait_s("next", 0.2) >= 0.9
    admission.served("n0", 0.3)
    assert admission.wait_s("other", 0.3) > 0.0, "an earlier peer has an earlier place"
    assert admission.wait_s("next", 1.2) == 0.0
    assert admission.wait_s("last", 1.2) > 0.0
    assert admission.wait_s("later", UNSERVED_TIMEOUT_S + 3.0) == 0.0, (
        "peers that were never served time out"
    )


@settings(deadline=None, max_examples=20)
@given(served_per_s=st.sampled_from([20.0, 50.0, 100.0]), seed=st.integers(0, 2**16))
def test_slow_service_lengthens_the_step_between_places(served_per_s: float, seed: int) -> None:
    rng = random.Random(seed)
    admission = ConnectionAdmission(250.0)
    count, tries, free_at = 600, 0, 0.0
    attempts = [(rng.uniform(0.0, 0.5), index, "dial") for index in range(count)]
    heapq.heapify(attempts)
    done = 0
    while attempts:
        now, index, what = heapq.heappop(attempts)
        if what == "served":
            admission.served(f"n{index}", now)
            done += 1
            continue
        tries += 1
        wait_s = admission.wait_s(f"n{index}", now)
        if wait_s == 0:
            free_at = max(free_at, now) + 1 / served_per_s
            heapq.heappush(attempts, (free_at, index, "served"))
        else:
            heapq.heappush(attempts, (now + wait_s + rng.uniform(0.0, 0.2), index, "dial"))
    assert done == count
    assert tries <= 4 * count
    assert now <= 1.3 * count / served_per_s + 5.0, "the scheduler is hardly ever idle"
